"""Panels on the command line: which environment reads and writes them, and how they are shown."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from schemas.errors import ConfigError

if TYPE_CHECKING:
    from data.tasks import Panel, Task

HOUSEHOLD, SEARCH = "household", "search"
NOUNS = {HOUSEHOLD: "games", SEARCH: "questions"}
LINES, TABLE = (".jsonl", ".xz"), (".parquet",)

T = TypeVar("T")


def load_panel(env: str, source: str, limit: int | None) -> Panel:
    """The panel of a source; a limit takes the tasks from the types in turn. Rows of data sets show progress on stderr.

    The built-in environments are not constructed: their panels need none of their options.
    """
    from data.environments import EnvironmentSpec
    from data.panel_sources import limit_panel

    if env == HOUSEHOLD:
        from data.household.panels import load_panel as load

        if source.endswith(TABLE):
            raise ConfigError(
                "a Parquet table is a panel of questions", where=source, expected="a panel of games",
                remedy="add --env search",
            )  # fmt: skip
        panel = load(source)
    elif env == SEARCH:
        from data.search.panels import load_panel as load_questions

        panel = load_questions(source, watch=lambda name, rows: watched(rows, f"reading {name}", "rows"))
    else:
        panel = EnvironmentSpec(env).build().panel(source)
    return panel if limit is None else limit_panel(panel, limit, spread=True)


def write_panel(env: str, panel: Panel, out: Path) -> None:
    """Write a panel in the form that its environment reads; other environments get JSON lines of whole tasks."""
    if env == HOUSEHOLD:
        from data.household.panel_file import write_panel as write

        write(panel, out)
    elif env == SEARCH:
        from data.search.panels import write_panel as write_questions

        write_questions(panel, out)
    else:
        from data.panel_lines import write_lines

        write_lines(panel, out)


def check_suffix(env: str, out: Path) -> None:
    """Raises ConfigError when the panel could not be read again under this name."""
    from data.environments import EnvironmentSpec

    EnvironmentSpec(env).target()
    suffixes = TABLE if env == SEARCH else LINES
    if out.suffix not in suffixes:
        raise ConfigError(
            f"a panel of {env} has another name", where="--out", expected=f"*{' or *'.join(suffixes)}", found=str(out)
        )


def sets_source(
    env: str, source: str | None, sets: list[str], wanted: Mapping[str, object], columns: str | None
) -> str:
    """The source that `rsipo tasks build` was given: SOURCE itself, or the `sets:` source of its `--set` options."""
    options = [f"{name}={value}" for name, value in wanted.items() if value is not None] + (
        [columns] if columns else []
    )
    if (source is None) == (not sets):
        raise ConfigError("build needs a source or data sets", where="tasks build", expected="SOURCE, or --set")
    if source is not None:
        if options:
            raise ConfigError(
                "options of data sets need --set", where="tasks build", found=", ".join(options),
                remedy="write them into the source",
            )  # fmt: skip
        return source
    if env != SEARCH:
        raise ConfigError("data sets are questions", where="--env", expected=SEARCH, found=env)
    return ",".join(["sets:" + "+".join(sets), *options])


def line_of(task: Task) -> str:
    """A task on one line: id, type, split, text and the beginning of its hash."""
    shown = (task.task_id, task.task_type, task.split, task.text)
    return "\t".join((*map(escaped, shown), task.sha256[:16]))


def summary(env: str, panel: Panel) -> str:
    """How many tasks, the panel's hash, and on lines of their own the counts by type and by each label."""
    lines = [f"{len(panel)} {noun(env)}, sha256 {panel.sha256}", _counts_text(type_counts(panel))]
    lines += [f"{escaped(name)}: {_counts_text(counts)}" for name, counts in label_counts(panel).items()]
    return "\n".join(lines)


def noun(env: str) -> str:
    """What the tasks of an environment are called."""
    return NOUNS.get(env, "tasks")


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{escaped(name)} {count}" for name, count in counts.items())


def type_counts(panel: Panel) -> dict[str, int]:
    """Tasks by type, sorted."""
    return dict(sorted(Counter(task.task_type for task in panel).items()))


def label_counts(panel: Panel) -> dict[str, dict[str, int]]:
    """For each label that a task has, the tasks by its value, sorted; tasks without it are not counted."""
    names = sorted({name for task in panel for name in task.labels})
    return {
        name: dict(sorted(Counter(task.labels[name] for task in panel if name in task.labels).items()))
        for name in names
    }


def as_json(env: str, panel: Panel) -> str:
    """The panel as one JSON object; characters outside ASCII are escaped."""
    rows = [
        {
            "id": task.task_id,
            "type": task.task_type,
            "split": task.split,
            "text": task.text,
            "sha256": task.sha256,
        }
        | ({"labels": dict(task.labels)} if task.labels else {})
        for task in panel
    ]
    counted = {"sha256": panel.sha256, noun(env): len(panel)} if env in NOUNS else {"sha256": panel.sha256}
    facts = counted | {"count": len(panel), "types": type_counts(panel), "labels": label_counts(panel)}
    return json.dumps(facts | {"tasks": rows}, indent=1)


def escaped(text: str) -> str:
    """Text from a file, on one line and without control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def watched(items: Iterable[T], what: str, unit: str, *, total: int | None = None) -> Iterator[T]:
    """Yield `items` while standard error shows how far it is."""
    from rsipo_cli.console import make_reporter

    reporter = make_reporter(quiet=False)
    reporter.stage(what, total, unit)
    try:
        for item in items:
            yield item
            reporter.advance()
    finally:
        with contextlib.suppress(ValueError):  # an error may end the command, and close stderr, before this generator
            reporter.done()
