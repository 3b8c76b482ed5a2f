"""Where files live that can always be made again: generated indexes, the cache of queries."""

from __future__ import annotations

import os
from pathlib import Path

from schemas.errors import ConfigError


def cache_home() -> Path:
    """`$RSIPO_CACHE`, else `$XDG_CACHE_HOME/rsipo`, else `~/.cache/rsipo`; absolute, not created.

    Empty variables count as unset, and so does a relative `XDG_CACHE_HOME`, as the XDG specification has it. Raises
    ConfigError for a user without a home directory, as in some containers.
    """
    own = os.environ.get("RSIPO_CACHE", "")
    if own:
        return Path(os.path.expanduser(own)).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():
        return Path(base) / "rsipo"
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise ConfigError(
            "there is no home directory to keep files that can be made again", remedy="name a directory in RSIPO_CACHE"
        )
    return Path(home) / ".cache" / "rsipo"
