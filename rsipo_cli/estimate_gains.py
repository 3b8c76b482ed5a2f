"""`rsipo estimate-gains`: gains, shrinkage and trust of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rsipo_cli import options
from rsipo_cli.execution import Invocation, execute

if TYPE_CHECKING:
    from schemas.run_directory import RunDirectory
    from stages.stage import Reporter, StageResult


def estimate_gains(
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
    """Estimate replay gains, shrink them by task type and turn them into trust."""

    def stage(directory: RunDirectory, reporter: Reporter) -> StageResult:
        from stages import estimate_gains

        number = step if step is not None else options.step_in_progress(directory)
        return estimate_gains.run(directory, number, force=force, reporter=reporter)

    execute(Invocation(run, preset, config, settings, False, dry_run, as_json, quiet), stage)
