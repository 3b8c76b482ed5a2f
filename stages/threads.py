"""How many CPU threads torch computes with: one rule for every process, because sums depend on it.

A process must always say the number itself, even the one that torch would take anyway: only then does MKL keep to it,
instead of choosing for each product. Without that, an update made after generating differs in its last bits from one made
in a process of its own.
"""

from __future__ import annotations

import os


def threads_of(threads: int, processes: int = 1) -> int:
    """Threads of each of `processes`; `threads` (run.threads) is what all may use, 0 every core there is.

    >>> threads_of(8, 4), threads_of(2, 4)
    (2, 1)
    """
    return max(1, (threads or len(os.sched_getaffinity(0))) // processes)


def set_threads(threads: int) -> None:
    """Make torch use `threads_of(threads)` in this process."""
    import torch

    torch.set_num_threads(threads_of(threads))
