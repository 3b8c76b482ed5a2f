"""`rsipo estimate-gains`: gains, shrinkage and trust of one step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rsipo_cli import options
from rsipo_cli.execution import Invocation, execute

if TYPE_CHECKING:
    from schemas.run_directory import RunDirectory
    from stages.stage import Reporter, StageResult


def estimate_gains(
    run: options.Run,
    step: options.Step = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Estimate all steps anew with other priors, into DIR; the run is only read."
        ),
    ] = None,
    force: options.Force = False,
    as_json: options.AsJson = False,
    dry_run: options.DryRun = False,
    preset: options.Preset = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    quiet: options.Quiet = False,
) -> None:
    """Estimate replay gains, shrink them by task type and turn them into trust.

    With `--out DIR` and `--set gains.decay=0.5` (or others of gains.*) the estimates of every step so far, or up to
    `--step`, are made again from the first on, into a directory of their own.
    """
    if out is not None:
        _audit(run, step, out, preset, config, settings, dry_run, as_json, quiet)
        return

    def stage(directory: RunDirectory, reporter: Reporter) -> StageResult:
        from stages import estimate_gains

        number = step if step is not None else options.step_in_progress(directory)
        return estimate_gains.run(directory, number, force=force, reporter=reporter)

    execute(Invocation(run, preset, config, settings, False, dry_run, as_json, quiet), stage)


def _audit(
    root: Path,
    last: int | None,
    out: Path,
    preset: str | None,
    config: Path | None,
    settings: list[str] | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Other priors on the same record: reads the run, locks nothing of it, writes to `out`."""
    from rsipo_cli.console import make_reporter, print_plan, print_result
    from rsipo_cli.plan import make_plan
    from schemas.run_directory import RunDirectory
    from stages import estimate_gains
    from stages.stage import StageResult

    resolved = options.resolve_config(root, preset, config, settings)
    if dry_run:
        print_plan(resolved, make_plan(resolved, out), as_json=as_json)
        return
    run = RunDirectory.open(root)
    steps = [step for step in run.finished_steps("replays") if last is None or step <= last]
    reporter = make_reporter(quiet=quiet)
    try:
        target = estimate_gains.audit(run, steps, resolved.gains, out, reporter=reporter)
    finally:
        reporter.done()
    rows = [{"step": step, **estimate_gains.summarise(target, step)} for step in steps]
    print_result(StageResult(estimate_gains.STAGE, steps[-1], "done", {"estimates": rows}), as_json=as_json)
