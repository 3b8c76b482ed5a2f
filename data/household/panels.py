"""Where panels come from: a source string or path becomes a sorted, hashed panel.

Sources
- `generated:size=small,split=valid_seen,seed=7,count=120[,types=a+b]`: games of our own generator;
- `alfworld:valid_seen`: a split of the official data below `$ALFWORLD_DATA`;
- a directory: the official tree or a part of it;
- a file: JSON lines, plain or `.xz` (see `data.household.panel_file`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from data.household.catalog import TASK_TYPES
from data.household.official_tree import TreeReport, read_tree
from data.household.panel_file import read_panel, write_panel
from data.household.scenes import SPLITS
from data.panel_sources import GENERATED, limit_panel, parse_options, whole_number
from data.tasks import Panel, Task
from schemas.errors import ConfigError

__all__ = ["limit_panel", "load_panel", "parse_generated", "read_source", "write_panel"]

LOG = logging.getLogger("rsipo.panels")
OFFICIAL = "alfworld:"
DEFAULTS: Mapping[str, str] = {"size": "small", "split": "valid_seen", "seed": "0", "types": "+".join(TASK_TYPES)}
EXAMPLE = "generated:size=small,split=valid_seen,seed=7,count=120"


def load_panel(source: str, *, limit: int | None = None, spread: bool = False) -> Panel:
    """The panel of a source, sorted by id and named after it.

    `limit` keeps the first tasks of the sorted panel; with `spread` it takes them from the task types in turn.
    Raises ConfigError for a source string or limit that cannot be, ArtifactError for files that cannot be read.
    """
    tasks, report, whole = read_source(source)
    if report is not None:
        for sentence in report.warnings(whole_splits=whole):
            LOG.warning("%s: %s", source, sentence)
    panel = Panel.of(source, tasks)
    return panel if limit is None else limit_panel(panel, limit, spread=spread)


def read_source(source: str) -> tuple[list[Task], TreeReport | None, bool]:
    """The tasks of a source, the report of a directory tree, and whether that tree was read in whole splits."""
    if source.startswith(GENERATED):
        return _generated(source), None, False
    if source.startswith(OFFICIAL):
        split = source.removeprefix(OFFICIAL)
        if split not in SPLITS:
            raise ConfigError(
                "unknown split of the official data", where=source, expected=" or ".join(SPLITS), found=repr(split)
            )
        tasks, report = read_tree(_official_folder(source), split)
        return tasks, report, True
    path = Path(source).expanduser()
    if path.is_dir():
        tasks, report = read_tree(path)
        return tasks, report, False
    return read_panel(path), None, False


def parse_generated(source: str) -> dict[str, str]:
    """The options of a `generated:` source, defaults filled in. Raises ConfigError naming the option at fault."""
    text = source.removeprefix(GENERATED)
    return parse_options(text, source, defaults=DEFAULTS, required=("count",), example=EXAMPLE)


def _generated(source: str) -> list[Task]:
    from data.household.generator import generate_panel

    options = parse_generated(source)
    panel = generate_panel(
        source,
        seed=whole_number(options["seed"], "seed", source),
        count=whole_number(options["count"], "count", source),
        size=options["size"],
        split=options["split"],
        task_types=options["types"].split("+"),
    )
    return list(panel.tasks)


def _official_folder(source: str) -> Path:
    folder = os.environ.get("ALFWORLD_DATA")
    if not folder:
        raise ConfigError(
            "the place of the official data is not known",
            where=source,
            expected="the environment variable ALFWORLD_DATA",
            found="not set",
            remedy="set it to the directory that holds json_2.1.x, or give the path of a panel file",
        )
    return Path(folder).expanduser()
