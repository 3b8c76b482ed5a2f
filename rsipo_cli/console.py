"""What a person sees: progress with ETA on stderr, results and plans on stdout; all text is made safe first."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from rsipo_cli.text import visible

if TYPE_CHECKING:
    from data.progress import Reporter
    from schemas.config import Config
    from stages.stage import StageResult

SECONDS_BETWEEN_LINES = 10.0


def make_reporter(*, quiet: bool, stream: TextIO | None = None) -> Reporter:
    """Nothing, a live bar, or where stderr is not a terminal a plain line every ten seconds."""
    from data.progress import SilentReporter

    stream = stream or sys.stderr
    if quiet:
        return SilentReporter()
    return BarReporter(stream) if stream.isatty() else LineReporter(stream)


class BarReporter:
    """A live bar on a terminal: stage, done of total, figures, time left."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._figures: dict[str, object] = {}

    def stage(self, name: str, total: int | None, unit: str) -> None:
        self.done()
        self._figures = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}  {task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._progress.start()
        self._task = self._progress.add_task(visible(name), total=total, unit=visible(unit), figures="")

    def advance(self, n: int = 1, **fields: object) -> None:
        if self._progress is None or self._task is None:
            return
        self._figures.update(fields)
        self._progress.update(self._task, advance=n, figures=figures_text(self._figures))

    def note(self, text: str) -> None:
        self._console.print(escape(visible(text)))

    def done(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None


class LineReporter:
    """Plain lines for logs and pipes: at the start, every ten seconds, and at the end of a stage."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._name, self._unit = "", ""
        self._total: int | None = None
        self._count = self._resumed = 0
        self._start = self._last = 0.0
        self._figures: dict[str, object] = {}
        self._open = False

    def stage(self, name: str, total: int | None, unit: str) -> None:
        self.done()
        self._name, self._total, self._unit = visible(name), total, visible(unit)
        self._count = self._resumed = 0
        self._figures = {}
        self._start = self._last = self._clock()
        self._open = True

    def advance(self, n: int = 1, **fields: object) -> None:
        if not self._open:
            return
        now = self._clock()
        self._count += n
        self._figures.update(fields)
        if now - self._start < 1.0:
            self._resumed = self._count  # parts found on disk say nothing about the speed
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            self._write(f"{self._progress()}{self._time_left(now)}")

    def note(self, text: str) -> None:
        self._write(visible(text))

    def done(self) -> None:
        if self._open:
            self._write(f"{self._progress()}, {duration_text(self._clock() - self._start)}")
        self._open = False

    def _progress(self) -> str:
        total = "" if self._total is None else f"/{self._total}"
        figures = figures_text(self._figures)
        return f"{self._name} {self._count}{total} {self._unit}" + (f", {figures}" if figures else "")

    def _time_left(self, now: float) -> str:
        fresh = self._count - self._resumed
        if self._total is None or fresh <= 0:
            return ""
        left = (self._total - self._count) * (now - self._start) / fresh
        return f", {duration_text(max(0.0, left))} left"

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def figures_text(figures: Mapping[str, object]) -> str:
    """`success 0.31, trust 1.04`, names and values made safe."""
    return ", ".join(f"{visible(name.replace('_', ' '))} {value_text(value)}" for name, value in figures.items())


def duration_text(seconds: float) -> str:
    """`7 s`, `2:05` or `1:02:05`.

    >>> duration_text(7.2), duration_text(125), duration_text(3725)
    ('7 s', '2:05', '1:02:05')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def value_text(value: object) -> str:
    """One value for a table or a progress line."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return visible(", ".join(f"{key} {value_text(inner)}" for key, inner in value.items()))
    if isinstance(value, (list, tuple)):
        return visible(", ".join(value_text(inner) for inner in value))
    return visible(str(value))


def print_result(result: StageResult, *, as_json: bool, stream: TextIO | None = None) -> None:
    """A stage's result on stdout: JSON, or a table. In its summary a list of mappings becomes a table of its own, a mapping
    a group of rows, and `next_command` the last line."""
    if as_json:
        facts = {"stage": result.stage, "step": result.step, "state": result.state, "summary": result.summary}
        print(json_text(facts), file=stream or sys.stdout)
        return
    console = _console(stream)
    state = "up to date" if result.state == "up_to_date" else "done"
    console.print(escape(visible(f"{result.stage}, step {result.step}: {state}")))
    summary = dict(result.summary)
    next_command = summary.pop("next_command", None)
    plain = {key: value for key, value in summary.items() if not _is_table(value)}
    _print_pairs(console, plain)
    for key, rows in summary.items():
        if _is_table(rows):
            _print_rows(console, key, rows)
    if next_command is not None:
        console.print(escape(visible(f"next: {next_command}")), soft_wrap=True)


def print_facts(title: str, facts: Mapping[str, object], *, stream: TextIO | None = None) -> None:
    """A heading and named values on stdout; a mapping becomes a group of rows."""
    console = _console(stream)
    console.print(escape(visible(title)), soft_wrap=True)
    _print_pairs(console, facts)


def print_plan(config: Config, plan: Mapping[str, Any], *, as_json: bool, stream: TextIO | None = None) -> None:
    """The resolved configuration and its plan on stdout, as TOML with comments or as JSON."""
    from schemas.config_loading import dump_toml

    if as_json:
        facts = {"config": config.model_dump(mode="json"), "plan": dict(plan)}
        print(json_text(facts), file=stream or sys.stdout)
        return
    lines = [f"# {key} = {_plan_text(key, value)}" for key, value in plan.items()]
    print(dump_toml(config) + "\n# plan, nothing was written\n" + "\n".join(lines), file=stream or sys.stdout)


def _plan_text(key: str, value: object) -> str:
    if value is None:
        return "unknown until the model is here" if "bytes" in key else "unknown until the panel is read"
    if isinstance(value, int):
        return f"{value:,} ({value / 1e6:,.1f} MB)" if "bytes" in key else f"{value:,}"
    return visible(str(value))


def json_text(value: object) -> str:
    """JSON with null for NaN and infinity; objects that JSON lacks become text."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=str)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def _is_table(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _console(stream: TextIO | None) -> Console:
    stream = stream or sys.stdout
    # Piped output must not depend on a width that nobody sees.
    return Console(file=stream, highlight=False, width=None if stream.isatty() else 200)


def _print_pairs(console: Console, pairs: Mapping[str, object]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in pairs.items():
        if isinstance(value, Mapping):
            for inner, part in value.items():
                table.add_row(escape(visible(f"{key} {inner}")), escape(value_text(part)))
        else:
            table.add_row(escape(visible(key)), escape(value_text(value)))
    if table.row_count:
        console.print(table)


def _print_rows(console: Console, title: str, rows: Sequence[Mapping[str, object]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=escape(visible(title)), title_justify="left")
    names = list(dict.fromkeys(str(name) for row in rows for name in row))
    for name in names:
        table.add_column(escape(visible(name)), overflow="fold")
    for row in rows:
        table.add_row(*(escape(value_text(row.get(name))) for name in names))
    console.print(table)
