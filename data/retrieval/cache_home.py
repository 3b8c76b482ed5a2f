"""Where files live that can always be made again: generated indexes, the cache of queries."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """`$RSIPO_CACHE`, else `$XDG_CACHE_HOME/rsipo`, else `~/.cache/rsipo`; absolute, not created.

    Empty variables count as unset, and so does a relative `XDG_CACHE_HOME`, as the XDG specification has it.
    """
    own = os.environ.get("RSIPO_CACHE", "")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():
        return Path(base) / "rsipo"
    return Path.home() / ".cache" / "rsipo"
