"""`rsipo sft-skills`: teach the base model to write skills."""

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


def sft_skills(
    annotations: Annotated[
        Path, typer.Option("--annotations", metavar="FILE", help="JSON lines of trajectories and their skills.")
    ],
    run: options.Run,
    force: options.Force = False,
    as_json: options.AsJson = False,
    dry_run: options.DryRun = False,
    preset: options.Preset = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    quiet: options.Quiet = False,
) -> None:
    """Fine-tune the base model to write skills; the result is checkpoint 0 of the run."""

    def stage(directory: RunDirectory, reporter: Reporter) -> StageResult:
        from stages import sft_skills as sft

        return sft.run(directory, annotations=annotations, force=force, reporter=reporter)

    invocation = Invocation(run, preset, config, settings, True, dry_run, as_json, quiet)
    execute(invocation, stage, saves=True)
