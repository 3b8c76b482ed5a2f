"""Where question panels come from: a source string or path becomes a sorted, hashed panel.

Sources
- a file ending in `.parquet`: a question table (`data.search.question_table`);
- `generated:articles=3000,seed=1,split=train,count=512[,hops=1+2][,draw=0]`: questions about the generated encyclopaedia;
  `articles` and `seed` are the world, `draw` chooses the questions;
- `sets:nq:train+hotpotqa:dev=FILE[,count=500][,seed=1]...`: data sets, from the hub or from local copies.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from data.panel_sources import GENERATED, limit_panel, parse_options, whole_number
from data.search.question_loading import hub_rows, hub_split, local_rows
from data.search.question_rows import subsample, tasks_of
from data.search.question_sets import Layout, QuestionSet, Row, flashrag_set, mapped_set, question_set
from data.search.question_table import read_questions, write_questions
from data.tasks import Panel, Task
from schemas.errors import ConfigError

__all__ = ["SetsSource", "load_panel", "parse_generated", "parse_sets", "parse_world", "read_source", "write_panel"]

LOG = logging.getLogger("rsipo.panels")
TABLE_SUFFIX, FROM_SETS = ".parquet", "sets:"
GENERATED_EXAMPLE = "generated:articles=3000,seed=1,split=train,count=512"
WORLD_EXAMPLE = "generated:articles=3000,seed=1"
GENERATED_DEFAULTS: Mapping[str, str] = {"articles": "3000", "seed": "1", "split": "train", "hops": "1+2", "draw": "0"}
SETS_EXAMPLE = "sets:nq:train+hotpotqa:dev=FILE,count=500,seed=1"
SETS_OPTIONS = ("count", "question", "answers", "id", "hops")
HUBS = ("own", "flashrag")

# Entries end where another begins (`+name:`); a path may hold a plus sign or a comma otherwise.
_BETWEEN = re.compile(r"\+(?=[\w.-]+:)")
_OPTIONS = re.compile(r",(?=\s*\w+\s*=)")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*\Z", re.ASCII)

Rows = Iterator[tuple[str, Row]]
Watch = Callable[[str, Rows], Rows]


def load_panel(source: str, *, limit: int | None = None, spread: bool = False, watch: Watch | None = None) -> Panel:
    """The panel of a source, sorted by id and named after it.

    `limit` keeps the first tasks of the sorted panel; with `spread` it takes them from the data sets in turn. `watch` is
    given the name and the rows of each data set and passes them on, for progress. Raises ConfigError for a source or limit
    that cannot be, ArtifactError for data that cannot be read.
    """
    panel = Panel.of(source, read_source(source, watch=watch))
    return panel if limit is None else limit_panel(panel, limit, spread=spread)


def write_panel(panel: Panel, path: Path | str) -> None:
    """Write a panel as a question table; see `data.search.question_table.write_questions`."""
    write_questions(panel.tasks, path)


def read_source(source: str, *, watch: Watch | None = None) -> list[Task]:
    """The tasks of a source; what a data set leaves out is logged."""
    if source.startswith(GENERATED):
        return _generated(source)
    if source.startswith(FROM_SETS):
        return _from_sets(parse_sets(source), watch)
    if source.endswith(TABLE_SUFFIX):
        return read_questions(Path(source).expanduser())
    raise ConfigError(
        "unknown source of questions",
        where=source,
        expected=f"a question table FILE{TABLE_SUFFIX}, {GENERATED_EXAMPLE} or {SETS_EXAMPLE}",
        remedy="`rsipo tasks build --env search` makes a question table from data sets",
    )


def parse_generated(source: str) -> dict[str, str]:
    """The options of a `generated:` source, defaults filled in. Raises ConfigError naming the option at fault."""
    return parse_options(
        source.removeprefix(GENERATED),
        source,
        defaults=GENERATED_DEFAULTS,
        required=("count",),
        example=GENERATED_EXAMPLE,
    )


def parse_world(source: str) -> tuple[int, int]:
    """Articles and seed of the encyclopaedia that an index source `generated:articles=3000,seed=1` names.

    Raises ConfigError naming the option at fault.
    """
    text = source.removeprefix(GENERATED)
    options = parse_options(
        text,
        source,
        defaults={"seed": "1"},
        required=("articles",),
        what="a generated encyclopaedia",
        example=WORLD_EXAMPLE,
    )
    return whole_number(options["articles"], "articles", source), whole_number(options["seed"], "seed", source)


def _generated(source: str) -> list[Task]:
    from data.search.encyclopaedia import generate_world

    options = parse_generated(source)
    numbers = {name: whole_number(options[name], name, source) for name in ("articles", "seed", "count", "draw")}
    hops = tuple(whole_number(hop, "hops", source) for hop in options["hops"].split("+"))
    world = generate_world(numbers["seed"], numbers["articles"])
    return world.questions(options["split"], hops, numbers["count"], numbers["draw"])


@dataclass(frozen=True)
class SetEntry:
    """One data set of a source: its name, split and local copy (None: the hub)."""

    name: str
    split: str
    path: Path | None

    def __str__(self) -> str:
        return f"{self.name}:{self.split}"


@dataclass(frozen=True)
class SetsSource:
    """A parsed `sets:` source. `count` is that of each set (None: all); `layout` the columns that the user named."""

    source: str
    entries: tuple[SetEntry, ...]
    count: int | None
    seed: int
    hub: str
    skip_bad: bool
    layout: Layout | None


def parse_sets(source: str) -> SetsSource:
    """Parse a `sets:` source. Raises ConfigError naming the entry or option at fault."""
    text, *rest = _OPTIONS.split(source.removeprefix(FROM_SETS), maxsplit=1)
    options = parse_options(
        rest[0] if rest else "seed=0",
        source,
        defaults={"seed": "0", "hub": "own", "bad": "error"},
        optional=SETS_OPTIONS,
        what="data sets",
        example=SETS_EXAMPLE,
    )
    _expect_one_of(options, "hub", HUBS, source)
    _expect_one_of(options, "bad", ("error", "skip"), source)
    entries = tuple(_entry(part, source) for part in _BETWEEN.split(text))
    if len({str(entry) for entry in entries}) < len(entries):
        raise ConfigError("a data set and split is given twice", where=source)
    count = whole_number(options["count"], "count", source) if "count" in options else None
    if count == 0:
        raise ConfigError("a panel needs a task", where=f"{source}, count", expected=">= 1", found=0)
    seed = whole_number(options["seed"], "seed", source)
    layout = _named_layout(options, source)
    parsed = SetsSource(source, entries, count, seed, options["hub"], options["bad"] == "skip", layout)
    for entry in entries:
        questions = _set_of(entry, parsed)
        if entry.path is None:  # found before anything is downloaded
            hub_split(questions, entry.split, source)
    return parsed


def _expect_one_of(options: Mapping[str, str], name: str, choices: tuple[str, ...], source: str) -> None:
    if options[name] not in choices:
        raise ConfigError(
            f"unknown value of the option {name}",
            where=source,
            expected=" or ".join(choices),
            found=repr(options[name]),
        )


def _entry(text: str, source: str) -> SetEntry:
    head, equals, path = text.partition("=")
    name, colon, split = (piece.strip() for piece in head.partition(":"))
    if not colon or not _NAME.match(name) or not _NAME.match(split) or bool(equals) != bool(path.strip()):
        raise ConfigError(
            "a data set is given as NAME:SPLIT or NAME:SPLIT=FILE",
            where=source,
            expected=f"as in {SETS_EXAMPLE}",
            found=repr(text),
        )
    return SetEntry(name, split, Path(path.strip()).expanduser() if equals else None)


def _named_layout(options: Mapping[str, str], source: str) -> Layout | None:
    """The columns that the user named; None where they are the set's own."""
    given = [name for name in ("question", "answers", "id", "hops") if name in options]
    if not given:
        return None
    missing = [name for name in ("question", "answers") if name not in options]
    if missing:
        raise ConfigError(
            f"the option {missing[0]} is missing",
            where=source,
            expected="question=COLUMN,answers=COLUMN[+COLUMN][,id=COLUMN][,hops=COLUMN]",
            found=", ".join(given),
        )
    answers = tuple(path.strip() for path in options["answers"].split("+"))
    ids = (options["id"],) if "id" in options else ()
    return Layout(options["question"], answers, ids, hops=options.get("hops"))


def _set_of(entry: SetEntry, parsed: SetsSource) -> QuestionSet:
    if entry.path is not None and parsed.layout is not None:
        return mapped_set(entry.name, parsed.layout)
    known = question_set(entry.name, where=parsed.source)
    if entry.path is None and parsed.layout is not None:
        raise ConfigError(
            "columns can be named for local files only", where=parsed.source, expected=f"{entry}=FILE", found=str(entry)
        )
    return flashrag_set(entry.name) if entry.path is None and parsed.hub == "flashrag" else known


def _from_sets(parsed: SetsSource, watch: Watch | None) -> list[Task]:
    tasks: list[Task] = []
    for entry in parsed.entries:
        questions = _set_of(entry, parsed)
        if entry.path is None:
            split = hub_split(questions, entry.split, parsed.source)
            rows = hub_rows(questions, entry.split, parsed.source)
        else:
            split, rows = entry.split, local_rows(entry.path, entry.split)
        rows = rows if watch is None else watch(str(entry), rows)
        where = str(entry.path or entry)
        found, left = tasks_of(rows, questions, split, where=where, skip_bad=parsed.skip_bad)
        for sentence in left.notes():
            LOG.warning("%s: %s", entry, sentence)
        if parsed.count is not None and len(found) < parsed.count:
            LOG.warning("%s: it has %d questions, fewer than count=%d; all are taken", entry, len(found), parsed.count)
        tasks += found if parsed.count is None else subsample(found, parsed.count, parsed.seed)
    return tasks
