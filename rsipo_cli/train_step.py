"""`rsipo train-step`: one update of the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rsipo_cli import options
from rsipo_cli.execution import Invocation, execute

if TYPE_CHECKING:
    from data.progress import Reporter
    from schemas.run_directory import RunDirectory
    from stages.stage import StageResult


def train_step(
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
    """Update the policy once, with ZeRO-3, on the rollouts and skills of a step."""

    def stage(directory: RunDirectory, reporter: Reporter) -> StageResult:
        from stages import train_step

        number = step if step is not None else options.step_in_progress(directory)
        return train_step.run(directory, number, force=force, reporter=reporter)

    execute(Invocation(run, preset, config, settings, False, dry_run, as_json, quiet), stage, saves=True)
