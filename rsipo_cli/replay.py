"""`rsipo replay`: skills are written and checked by replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rsipo_cli import options
from rsipo_cli.execution import Invocation, execute

if TYPE_CHECKING:
    from data.progress import Reporter
    from schemas.run_directory import RunDirectory
    from stages.stage import StageResult


def replay(
    run: options.Run,
    step: options.Step = None,
    force: options.Force = False,
    as_json: options.AsJson = False,
    dry_run: options.DryRun = False,
    preset: options.Preset = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    quiet: options.Quiet = False,
) -> None:
    """Write a skill for each task of a step and check it by exact replay."""

    def stage(directory: RunDirectory, reporter: Reporter) -> StageResult:
        from stages import replay

        number = step if step is not None else options.step_in_progress(directory)
        return replay.run(directory, number, force=force, reporter=reporter)

    execute(Invocation(run, preset, config, settings, False, dry_run, as_json, quiet), stage)
