"""`rsipo estimate-gains`: gains, shrinkage and trust of one step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rsipo_cli import options
from rsipo_cli.execution import Invocation, execute

if TYPE_CHECKING:
    from data.progress import Reporter
    from schemas.config import Config
    from schemas.run_directory import RunDirectory
    from stages.stage import StageResult


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

    run = RunDirectory.open(root)
    resolved = options.resolve_config(root, preset, config, settings)
    _expect_only_gains(run.config, resolved)
    if dry_run:
        print_plan(resolved, make_plan(resolved, out), as_json=as_json)
        return
    steps = [step for step in run.finished_steps("replays") if last is None or step <= last]
    reporter = make_reporter(quiet=quiet)
    try:
        target = estimate_gains.audit(run, steps, resolved.gains, out, reporter=reporter)
    finally:
        reporter.done()
    rows = [{"step": step, **estimate_gains.summarise(target, step)} for step in steps]
    print_result(StageResult(estimate_gains.STAGE, steps[-1], "done", {"estimates": rows}), as_json=as_json)


def _expect_only_gains(stored: Config, given: Config) -> None:
    """Refuse settings that estimates of a record cannot follow: it was played with the run's own."""
    from schemas.config_loading import differing_keys
    from schemas.errors import ConfigError

    if others := [entry for entry in differing_keys(stored, given) if not entry.startswith("gains.")]:
        raise ConfigError(
            "estimates with --out take other values of gains.* only",
            where="--set, --config or --preset",
            expected="the run's own values elsewhere (stored, given)",
            found=", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else ""),
            remedy="leave them out",
        )
