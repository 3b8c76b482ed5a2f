"""The frame every stage command runs in: open the run, plan or lock, call one stage, print its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rsipo_cli.options import open_run, resolve_config

if TYPE_CHECKING:
    from data.progress import Reporter
    from schemas.config import Config
    from schemas.run_directory import RunDirectory
    from stages.stage import StageResult


@dataclass(frozen=True)
class Invocation:
    """The shared options of one call."""

    run: Path
    preset: str | None = None
    config: Path | None = None
    settings: list[str] | None = None
    may_start: bool = False
    dry_run: bool = False
    as_json: bool = False
    quiet: bool = False


def execute(
    invocation: Invocation,
    stage: Callable[[RunDirectory, Reporter], StageResult],
    *,
    saves: bool = False,
    check: Callable[[StageResult, Config], None] | None = None,
) -> None:
    """Run one stage under the run's lock, or show its plan. `saves` stages need room for a checkpoint.

    `check` may raise what is to be said of a result after it was printed.
    """
    from rsipo_cli.console import make_reporter, print_result

    if invocation.dry_run:
        show_plan(invocation)
        return
    run = open_run(
        invocation.run, invocation.preset, invocation.config, invocation.settings, may_start=invocation.may_start
    )
    reporter = make_reporter(quiet=invocation.quiet)
    reporter.note(f"run directory {run.root}")
    try:
        with run.lock():
            _check_space(run, saves)
            result = stage(run, reporter)
    finally:
        reporter.done()
    print_result(result, as_json=invocation.as_json)
    if check is not None:
        check(result, run.config)


def show_plan(invocation: Invocation) -> None:
    """Print the resolved configuration and what it amounts to; writes nothing."""
    from rsipo_cli.console import print_plan
    from rsipo_cli.plan import make_plan

    config = resolve_config(invocation.run, invocation.preset, invocation.config, invocation.settings)
    print_plan(config, make_plan(config, invocation.run), as_json=invocation.as_json)


def _check_space(run: RunDirectory, saves: bool) -> None:
    from rsipo_cli.plan import MINIMUM_FREE_BYTES, checkpoint_bytes
    from schemas.run_directory import free_space_check

    checkpoint = checkpoint_bytes(run.config) if saves else None
    free_space_check(run.root, MINIMUM_FREE_BYTES + (checkpoint or 0))
