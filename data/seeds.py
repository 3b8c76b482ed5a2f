"""One function from which every random draw comes: (seed, names and numbers of the draw) -> a 63-bit seed."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: int | str) -> int:
    """A seed in [0, 2**63) that depends on its arguments alone; no global state, no hash seed.

    >>> derive_seed(0, "rollout", 1, "task", 3, 0) == derive_seed(0, "rollout", 1, "task", 3, 0)
    True
    >>> derive_seed(0, "rollout", 1) != derive_seed(0, "rollout", 2)
    True
    """
    text = "\x1f".join([str(seed), *(f"{type(name).__name__}:{name}" for name in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
