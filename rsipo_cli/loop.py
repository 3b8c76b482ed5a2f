"""`rsipo loop`: the whole iteration, repeated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rsipo_cli import options
from rsipo_cli.execution import Invocation, execute

if TYPE_CHECKING:
    from data.progress import Reporter
    from schemas.run_directory import RunDirectory
    from stages.stage import StageResult


def loop(
    run: options.OptionalRun = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, metavar="N", help="Train up to step N; default: run.steps.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Rebuild steps that another version of the code or environment trained.")
    ] = False,
    as_json: options.AsJson = False,
    dry_run: options.DryRun = False,
    preset: options.Preset = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    quiet: options.Quiet = False,
) -> None:
    """Run RSIPO: rollout, replay, estimate-gains and train-step, repeated, with evaluations in between.

    Without a configuration it runs the preset household-tiny in ./runs/household-tiny. The same command continues a run
    that was stopped at any point.
    """
    root = run if run is not None else Path("runs") / _name(preset, config)

    def stage(directory: RunDirectory, reporter: Reporter) -> StageResult:
        from stages import loop as stages_loop

        return stages_loop.run(directory, steps=steps, force=force, reporter=reporter)

    invocation = Invocation(root, preset, config, settings, True, dry_run, as_json, quiet)
    execute(invocation, stage, saves=True)


def _name(preset: str | None, config: Path | None) -> str:
    if config is not None:
        return config.stem
    return preset or options.DEFAULT_PRESET
