"""`rsipo evaluate`: how often a checkpoint or any model wins the tasks of a panel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rsipo_cli import options
from rsipo_cli.execution import Invocation, execute

if TYPE_CHECKING:
    from data.progress import Reporter
    from schemas.config import Config
    from schemas.run_directory import RunDirectory
    from stages.stage import StageResult

Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="PATH", help="A model directory, hub name or bundled:NAME instead of a checkpoint."
    ),
]
Step = Annotated[
    int | None, typer.Option("--step", min=0, metavar="N", help="The checkpoint to evaluate; default: the latest.")
]
Panel = Annotated[
    str | None,
    typer.Option("--panel", metavar="SOURCE", help="The tasks; default: tasks.evaluate of the configuration."),
]
Attempts = Annotated[int | None, typer.Option("--attempts", min=1, metavar="K", help="Episodes per task.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, metavar="N", help="Seed of the evaluation.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0.0, metavar="T", help="Sampling temperature; 0 is greedy.")
]
Batch = Annotated[
    int | None, typer.Option("--batch", min=1, metavar="N", help="Episodes played together; changes no result.")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to write; default: the run directory.")]


def evaluate(
    run: options.OptionalRun = None,
    step: Step = None,
    model: Model = None,
    panel: Panel = None,
    attempts: Attempts = None,
    seed: Seed = None,
    temperature: Temperature = None,
    batch: Batch = None,
    out: Out = None,
    force: options.Force = False,
    as_json: options.AsJson = False,
    dry_run: options.DryRun = False,
    preset: options.Preset = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    quiet: options.Quiet = False,
) -> None:
    """Play every task of a panel with a checkpoint or model, no skill in context, and report success."""
    _check_combination(run, model, out)
    chosen: dict[str, Any] = {
        "model": model,
        "panel": panel,
        "attempts": attempts,
        "seed": seed,
        "temperature": temperature,
        "batch": batch,
        "out": out,
        "force": force,
    }
    if dry_run:
        _show_plan(run, step, chosen, options.resolve_config(run, preset, config, settings), as_json)
    elif run is not None and out is None:
        invocation = Invocation(run, preset, config, settings, False, False, as_json, quiet)
        execute(invocation, lambda directory, reporter: _stage(directory, step, reporter, chosen), check=_check)
    else:
        _without_lock(run, step, chosen, options.resolve_config(run, preset, config, settings), as_json, quiet)


def _check_combination(run: Path | None, model: str | None, out: Path | None) -> None:
    from schemas.errors import ConfigError

    if run is None and model is None:
        raise ConfigError("nothing to evaluate", expected="--run DIR or --model PATH", remedy="name one of them")
    if run is None and out is None:
        raise ConfigError(
            "nowhere to write", where="--out", expected="a directory", remedy="add --out DIR or --run DIR"
        )


def _stage(directory: RunDirectory | None, step: int | None, reporter: Reporter, chosen: dict[str, Any]) -> StageResult:
    from stages import evaluate as stages_evaluate

    config = chosen.get("config") or (directory.config if directory else None)
    return stages_evaluate.run(directory, step, reporter=reporter, **{**chosen, "config": config})


def _without_lock(
    run: Path | None,
    step: int | None,
    chosen: dict[str, Any],
    resolved: Config,
    as_json: bool,
    quiet: bool,
) -> None:
    """Evaluation that only reads the run, if any, and writes to `--out`: it may go on beside a writer of the run."""
    from rsipo_cli.console import make_reporter, print_result
    from schemas.run_directory import RunDirectory

    directory = RunDirectory.open(run) if run is not None else None
    reporter = make_reporter(quiet=quiet)
    try:
        result = _stage(directory, step, reporter, {**chosen, "config": resolved})
    finally:
        reporter.done()
    print_result(result, as_json=as_json)
    _check(result, resolved)


def _check(result: StageResult, config: Config) -> None:
    from stages import evaluate as stages_evaluate

    stages_evaluate.check_errors(result, config)


def _show_plan(run: Path | None, step: int | None, chosen: dict[str, Any], config: Config, as_json: bool) -> None:
    """The configuration with the options in it, and what would be evaluated on what; writes nothing."""
    from rsipo_cli.console import print_plan
    from rsipo_cli.plan import make_evaluation_plan
    from stages.evaluation_settings import EvaluationOptions

    names = ("model", "panel", "attempts", "seed", "temperature", "batch")
    given = EvaluationOptions(**{name: chosen[name] for name in names})
    applied = given.of_the_run(config) if chosen["out"] is None else given.applied(config)
    played = (
        f"{'the latest checkpoint' if step is None else f'checkpoint {step}'} of {run}"
        if chosen["model"] is None
        else chosen["model"]
    )
    plan = make_evaluation_plan(applied, played, given.batch_of(config), chosen["out"] or run)
    print_plan(applied, plan, as_json=as_json)
