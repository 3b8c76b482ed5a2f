"""Where panels come from: a source string or path becomes a sorted, hashed panel.

Sources
- `generated:size=small,split=valid_seen,seed=7,count=120[,types=a+b]`: games of our own generator;
- `alfworld:valid_seen`: a split of the official data below `$ALFWORLD_DATA`;
- a directory: the official tree or a part of it;
- a file: JSON lines, plain or `.xz` (see `data.household.panel_file`).
"""

from __future__ import annotations

import difflib
import logging
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from data.household.catalog import TASK_TYPES
from data.household.official_tree import TreeReport, read_tree
from data.household.panel_file import read_panel, write_panel
from data.household.scenes import SPLITS
from data.tasks import Panel, Task
from schemas.errors import ConfigError

__all__ = ["limit_panel", "load_panel", "parse_generated", "read_source", "write_panel"]

LOG = logging.getLogger("rsipo.panels")
GENERATED, OFFICIAL = "generated:", "alfworld:"
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


def limit_panel(panel: Panel, limit: int, *, spread: bool = False) -> Panel:
    """The first `limit` tasks of a panel (all when it has fewer); with `spread`, one of each type in turn."""
    if isinstance(limit, bool) or limit < 1:
        raise ConfigError("a panel needs a task", where="limit", expected=">= 1", found=limit)
    tasks = list(panel.tasks)
    if spread:
        by_type: dict[str, list[Task]] = defaultdict(list)
        for task in tasks:
            by_type[task.task_type].append(task)
        turns = [(turn, kind, task) for kind in by_type for turn, task in enumerate(by_type[kind])]
        tasks = [task for _, _, task in sorted(turns, key=lambda entry: entry[:2])]
    return Panel.of(panel.name, tasks[:limit])


def parse_generated(source: str) -> dict[str, str]:
    """The options of a `generated:` source, defaults filled in. Raises ConfigError naming the option at fault."""
    known = (*DEFAULTS, "count")
    options: dict[str, str] = {}
    for part in source.removeprefix(GENERATED).split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"for example {EXAMPLE}"
            raise ConfigError(
                "unknown option of a generated panel",
                where=source,
                expected=f"one of {', '.join(known)}",
                found=repr(name),
                remedy=remedy,
            )
        if not equals or not value:
            raise ConfigError(f"the option {name} has no value", where=source, expected=f"{name}=...", found=repr(part))
        if name in options:
            raise ConfigError(f"the option {name} is given twice", where=source)
        options[name] = value
    if "count" not in options:
        raise ConfigError("the option count is missing", where=source, expected="count=...", remedy=f"as in {EXAMPLE}")
    return {**DEFAULTS, **options}


def _generated(source: str) -> list[Task]:
    from data.household.generator import generate_panel

    options = parse_generated(source)
    panel = generate_panel(
        source,
        seed=_whole(options["seed"], "seed", source),
        count=_whole(options["count"], "count", source),
        size=options["size"],
        split=options["split"],
        task_types=options["types"].split("+"),
    )
    return list(panel.tasks)


def _whole(text: str, name: str, source: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is not a number", where=source, expected="a whole number >= 0", found=repr(text))
    return int(text)


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
