"""`rsipo tasks generate | list | check`: make, look at and prove panels of household games."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from data.tasks import Panel, Task

app = typer.Typer(
    help="Make, list and check panels of household games.", no_args_is_help=True, pretty_exceptions_enable=False
)

SOURCE_HELP = (
    "A panel file (JSON lines, plain or .xz), a directory of official games, alfworld:SPLIT, or "
    "generated:size=small,split=valid_seen,seed=7,count=120."
)
Source = Annotated[str, typer.Argument(help=SOURCE_HELP)]
Limit = Annotated[int | None, typer.Option(help="Only the first N games, taken from the types in turn.")]


@app.command()
def generate(
    out: Annotated[Path, typer.Option(help="The file to write; compressed when it ends in .xz.")],
    count: Annotated[int, typer.Option(help="How many games.")],
    size: Annotated[str, typer.Option(help="small (5 to 8 receptacles) or full (whole floor plans).")] = "small",
    split: Annotated[str, typer.Option(help="train, valid_seen or valid_unseen.")] = "train",
    seed: Annotated[int, typer.Option(help="The stream of games; the same seed gives the same games.")] = 0,
    types: Annotated[str | None, typer.Option(help="Task types joined by + or commas (default: all six).")] = None,
) -> None:
    """Generate games, each proved solvable, and write them as one panel file."""
    from data.household.catalog import TASK_TYPES
    from data.household.generator import generate_games
    from data.household.panel_file import write_panel
    from data.tasks import Panel

    names = [name.strip() for name in (types or "+".join(TASK_TYPES)).replace(",", "+").split("+")]
    games = generate_games(seed=seed, count=count, size=size, split=split, task_types=names)
    panel = Panel.of(str(out), list(_with_progress(games, count, "generating")))
    write_panel(panel, out)
    typer.echo(f"{out}: {len(panel)} games, sha256 {panel.sha256}")
    typer.echo(_type_counts(panel))


@app.command("list")
def list_(
    source: Source,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    limit: Limit = None,
) -> None:
    """List the games of a panel: id, type, split, instruction, hash; then the panel's hash and counts."""
    panel = _load(source, limit)
    if json_:
        typer.echo(_as_json(panel))
        return
    for task in panel:
        typer.echo("\t".join((task.task_id, task.task_type, task.split, _escaped(task.text), task.sha256[:16])))
    typer.echo(f"{len(panel)} games, sha256 {panel.sha256}")
    typer.echo(_type_counts(panel))


@app.command()
def check(
    source: Source,
    stock: Annotated[bool, typer.Option("--stock", help="Also play each plan on the stock engine (slow).")] = False,
    limit: Limit = None,
) -> None:
    """Load every game and prove it solvable by playing the oracle's plan. Exits with 1 when a game is bad."""
    from data.household.oracle import oracle_plan, solvability_fault
    from data.household.panels import limit_panel, read_source
    from data.tasks import Panel

    tasks, report, whole = read_source(source)
    panel = Panel.of(source, tasks)
    panel = panel if limit is None else limit_panel(panel, limit, spread=True)
    bad: list[str] = []
    lengths: list[int] = []
    for task in _with_progress(panel, len(panel), "checking"):
        fault = solvability_fault(task)
        if fault is None and stock:
            fault = _stock_fault(task, oracle_plan(task))
        if fault is None:
            lengths.append(len(oracle_plan(task)))
        else:
            bad.append(f"{task.task_id}: {fault}")
    bad += list(report.bad) if report is not None else []
    for line in bad:
        typer.echo(f"bad: {_escaped(line)}")
    for line in report.warnings(whole_splits=whole) if report is not None else ():
        typer.echo(f"note: {_escaped(line)}", err=True)
    mean = f", {sum(lengths) / len(lengths):.1f} commands at the mean" if lengths else ""
    typer.echo(f"{len(lengths)} of {len(lengths) + len(bad)} games are good{mean}; sha256 {panel.sha256}")
    typer.echo(_type_counts(panel))
    if bad:
        raise typer.Exit(1)


def _load(source: str, limit: int | None) -> Panel:
    from data.household.panels import load_panel

    return load_panel(source, limit=limit, spread=True)


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


def _as_json(panel: Panel) -> str:
    import json

    rows = [
        {
            "id": task.task_id,
            "type": task.task_type,
            "split": task.split,
            "text": task.text,
            "sha256": task.sha256,
        }
        for task in panel
    ]
    counts = dict(sorted(Counter(task.task_type for task in panel).items()))
    return json.dumps({"sha256": panel.sha256, "games": len(panel), "types": counts, "tasks": rows}, indent=1)


def _type_counts(panel: Panel) -> str:
    counts = sorted(Counter(task.task_type for task in panel).items())
    return ", ".join(f"{name} {count}" for name, count in counts)


def _escaped(text: str) -> str:
    """Text from a file, on one line and without control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _with_progress(tasks: Iterable[Task], total: int, what: str) -> Iterable[Task]:
    """Yield `tasks` while a bar on standard error (only on a terminal) shows how far it is."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(tasks, description=what, total=total, console=console, transient=True, disable=not console.is_terminal)
