"""`rsipo tasks generate | build | list | check`: make, look at and check panels of any environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Make, list and check panels of tasks.", no_args_is_help=True, pretty_exceptions_enable=False)

SOURCE_HELP = (
    "household: a panel file (JSON lines, plain or .xz), a directory of official games, alfworld:SPLIT, or "
    "generated:size=small,split=valid_seen,seed=7,count=120. search: a question table (.parquet), "
    "generated:articles=3000,seed=1,split=train,count=512, or sets:nq:train+hotpotqa:dev=FILE,count=500. "
    "Other environments: their own."
)
Source = Annotated[str, typer.Argument(help=SOURCE_HELP)]
OptionalSource = Annotated[str | None, typer.Argument(help=SOURCE_HELP)]
Env = Annotated[str, typer.Option("--env", metavar="NAME", help="household, search or module:Class.")]
Limit = Annotated[int | None, typer.Option(help="Only the first N tasks, taken from the types in turn.")]


@app.command()
def generate(
    out: Annotated[Path, typer.Option(help="The file to write; compressed when it ends in .xz.")],
    count: Annotated[int, typer.Option(help="How many games.")],
    size: Annotated[str, typer.Option(help="small (5 to 8 receptacles) or full (whole floor plans).")] = "small",
    split: Annotated[str, typer.Option(help="train, valid_seen or valid_unseen.")] = "train",
    seed: Annotated[int, typer.Option(help="The stream of games; the same seed gives the same games.")] = 0,
    types: Annotated[str | None, typer.Option(help="Task types joined by + or commas (default: all six).")] = None,
) -> None:
    """Generate household games, each proved solvable, and write them as one panel file."""
    from data.household.catalog import TASK_TYPES
    from data.household.generator import generate_games
    from data.tasks import Panel
    from rsipo_cli.task_panels import HOUSEHOLD, summary, watched, write_panel

    names = [name.strip() for name in (types or "+".join(TASK_TYPES)).replace(",", "+").split("+")]
    games = generate_games(seed=seed, count=count, size=size, split=split, task_types=names)
    panel = Panel.of(str(out), list(watched(games, "generating", "games", total=count)))
    write_panel(HOUSEHOLD, panel, out)
    typer.echo(f"{out}: {summary(HOUSEHOLD, panel)}")


@app.command()
def build(
    out: Annotated[Path, typer.Option(help="The file to write: .parquet for search, .jsonl or .jsonl.xz otherwise.")],
    source: OptionalSource = None,
    env: Env = "household",
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME:SPLIT[=FILE]", help="A data set, from the hub or a local copy; repeatable."
        ),
    ] = None,
    count: Annotated[int | None, typer.Option(help="How many questions of each data set (default: all).")] = None,
    seed: Annotated[int | None, typer.Option(help="Which questions --count chooses.")] = None,
    hub: Annotated[
        str | None, typer.Option(metavar="own|flashrag", help="Each set's own repository, or the FlashRAG collection.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="MAPPING", help="Columns of local files, as question=query,answers=gold.aliases,id=key."),
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave rows without question or answer out.")] = False,
    limit: Limit = None,
) -> None:
    """Load a source, or data sets given by --set, and write the panel as one file."""
    from rsipo_cli.task_panels import check_suffix, load_panel, sets_source, summary, write_panel

    wanted = {"count": count, "seed": seed, "hub": hub, "bad": "skip" if skip_bad else None}
    source = sets_source(env, source, sets or [], wanted, columns)
    check_suffix(env, out)
    panel = load_panel(env, source, limit)
    write_panel(env, panel, out)
    typer.echo(f"{out}: {summary(env, panel)}")


@app.command("list")
def list_(
    source: Source,
    env: Env = "household",
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    limit: Limit = None,
) -> None:
    """List the tasks of a panel: id, type, split, text, hash; then the panel's hash and counts."""
    from rsipo_cli.task_panels import as_json, line_of, load_panel, summary

    panel = load_panel(env, source, limit)
    if json_:
        typer.echo(as_json(env, panel))
        return
    for task in panel:
        typer.echo(line_of(task))
    typer.echo(summary(env, panel))


@app.command()
def check(
    source: Source,
    env: Env = "household",
    stock: Annotated[bool, typer.Option("--stock", help="household: play each plan on the stock engine too.")] = False,
    index: Annotated[
        str | None, typer.Option(metavar="DIR", help="search: how often this index finds a gold answer.")
    ] = None,
    topk: Annotated[int, typer.Option(min=1, help="search: how many passages a question may look at.")] = 3,
    limit: Limit = None,
) -> None:
    """Check every task of a panel. Exits with 1 when one is bad.

    household: the oracle's plan wins. search: questions and answers are usable. Others: a task starts the same twice.
    """
    from rsipo_cli import task_checks
    from rsipo_cli.task_panels import HOUSEHOLD, SEARCH
    from schemas.errors import ConfigError

    for option, given, belongs in (("--stock", stock, HOUSEHOLD), ("--index", index is not None, SEARCH)):
        if given and env != belongs:
            raise ConfigError(f"{option} belongs to another environment", where="--env", expected=belongs, found=env)
    if env == HOUSEHOLD:
        outcome = task_checks.check_games(source, limit, stock=stock)
    elif env == SEARCH:
        outcome = task_checks.check_questions(source, limit, index=index, topk=topk)
    else:
        outcome = task_checks.check_starts(env, source, limit)
    task_checks.show(env, outcome)
    if outcome.bad:
        raise typer.Exit(1)
