"""What `rsipo tasks check` does for each environment, and how it tells the outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from rsipo_cli.task_panels import SEARCH, escaped, load_panel, noun, summary, watched

if TYPE_CHECKING:
    from data.environments import Environment
    from data.retrieval.index.directory import IndexDirectory
    from data.tasks import Panel, Task


@dataclass
class Outcome:
    """A checked panel: what is bad, notes that are no fault, lines of figures, and how many of `total` tasks are good."""

    panel: Panel
    bad: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    good: int = 0
    total: int = 0
    mean: str = ""


def show(env: str, outcome: Outcome) -> None:
    """Bad tasks and figures on stdout, notes on stderr; file text is escaped."""
    for line in outcome.bad:
        typer.echo(f"bad: {escaped(line)}")
    for line in outcome.notes:
        typer.echo(f"note: {escaped(line)}", err=True)
    for line in outcome.figures:
        typer.echo(escaped(line))
    _, *rest = summary(env, outcome.panel).splitlines()
    checked = f"{outcome.good} of {outcome.total} {noun(env)} are good{outcome.mean}"
    typer.echo(f"{checked}; sha256 {outcome.panel.sha256}")
    for line in rest:
        typer.echo(line)


def check_games(source: str, limit: int | None, *, stock: bool) -> Outcome:
    """Play the oracle's plan of every game, with `stock` on the stock engine too."""
    from data.household.oracle import oracle_plan, solvability_fault
    from data.household.panels import read_source
    from data.panel_sources import limit_panel
    from data.tasks import Panel

    tasks, report, whole = read_source(source)
    panel = Panel.of(source, tasks)
    outcome = Outcome(panel if limit is None else limit_panel(panel, limit, spread=True))
    commands = 0
    for task in watched(outcome.panel, "checking", "games", total=len(outcome.panel)):
        fault = solvability_fault(task)
        if fault is None and stock:
            fault = _stock_fault(task, oracle_plan(task))
        if fault is None:
            outcome.good += 1
            commands += len(oracle_plan(task))
        else:
            outcome.bad.append(f"{task.task_id}: {fault}")
    if report is not None:
        outcome.bad += report.bad
        outcome.notes += report.warnings(whole_splits=whole)
    outcome.total = outcome.good + len(outcome.bad)  # files that hold no game count
    if outcome.good:
        outcome.mean = f", {commands / outcome.good:.1f} commands at the mean"
    return outcome


def _stock_fault(task: Task, commands: list[str]) -> str | None:
    """Why the stock engine does not win the game with these commands; None when it does."""
    from data.household.stock import StockSession

    session = StockSession(task, version="")
    try:
        for command in commands:
            if session.step(command).won:
                return None
        return "the stock engine does not win with the plan"
    finally:
        session.close()


def check_questions(source: str, limit: int | None, *, index: str | None, topk: int) -> Outcome:
    """Questions and answers are more than articles and punctuation; with an index, how often it finds a gold answer."""
    from data.search.question_checks import question_faults, repeated_questions
    from data.search.retrievers import open_index

    outcome = Outcome(load_panel(SEARCH, source, limit))
    opened = None if index is None else open_index(index)
    usable: list[Task] = []
    for task in outcome.panel:
        faults = question_faults(task)
        if opened is not None and task.payload.get("corpus") not in (None, opened.corpus_sha256):
            faults.append(f"it belongs to another corpus than {index}")
        if faults:
            outcome.bad.append(f"{task.task_id}: {'; '.join(faults)}")
        else:
            usable.append(task)
    outcome.good, outcome.total = len(usable), len(outcome.panel)
    repeated = repeated_questions(outcome.panel)
    if repeated:
        earlier, later = repeated[0]
        outcome.notes.append(
            f"{len(repeated)} questions are asked before under another id: {later.task_id} asks what {earlier.task_id} does"
        )
    if opened is not None and usable:
        outcome.figures += _recall_lines(opened, usable, topk)
    return outcome


def _recall_lines(index: IndexDirectory, tasks: list[Task], topk: int) -> list[str]:
    from data.retrieval.open_index import retriever_of
    from data.search.question_checks import recall_by_set
    from rsipo_cli.console import make_reporter

    retriever, reporter = retriever_of(index), make_reporter(quiet=False)
    reporter.stage("looking up", len(tasks), "questions")
    try:
        recalls = recall_by_set(retriever, tasks, topk, advance=reporter.advance)
    finally:
        reporter.done()
        retriever.close()
    return [
        f"recall@{topk} {recall.data_set} {recall.share:.3f} ({recall.found} of {recall.asked} questions)"
        for recall in recalls
    ]


def check_starts(env: str, source: str, limit: int | None) -> Outcome:
    """Start every task of another environment twice: both starts must have one fingerprint."""
    from data.environments import EnvironmentSpec
    from schemas.errors import RsipoError

    environment = EnvironmentSpec(env).build()
    outcome = Outcome(load_panel(env, source, limit))
    outcome.total = len(outcome.panel)
    for task in watched(outcome.panel, "checking", noun(env), total=len(outcome.panel)):
        try:
            fingerprints = {_fingerprint(environment, task) for _ in range(2)}
        except RsipoError as error:
            outcome.bad.append(f"{task.task_id}: {error}")
            continue
        if len(fingerprints) > 1:
            outcome.bad.append(f"{task.task_id}: it does not start the same twice")
        else:
            outcome.good += 1
    return outcome


def _fingerprint(environment: Environment, task: Task) -> str:
    session = environment.start(task)
    try:
        return session.fingerprint
    finally:
        session.close()
