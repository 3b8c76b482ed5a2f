"""The options that several commands share, and how they become a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from schemas.config import Config
    from schemas.run_directory import RunDirectory

DEFAULT_PRESET = "household-tiny"

Run = Annotated[Path, typer.Option("--run", metavar="DIR", help="The run directory.")]
OptionalRun = Annotated[Path | None, typer.Option("--run", metavar="DIR", help="The run directory.")]
Step = Annotated[
    int | None,
    typer.Option(
        "--step",
        min=1,
        metavar="N",
        help="The step; default: the one in progress, which follows the last trained step. If it is done: up to date.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Rebuild the step if it is stale or damaged.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and plan; write nothing.")]
Preset = Annotated[str | None, typer.Option("--preset", metavar="NAME", help="A configuration of the package.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="A TOML configuration file.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set one key; repeatable.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]


def resolve_config(root: Path | None, preset: str | None, file: Path | None, settings: list[str] | None) -> Config:
    """The configuration a command would use, without writing anything.

    A preset or file stands for itself. With `--set` alone, or nothing, the base is the run's own configuration if it was
    started, else the preset household-tiny.
    """
    from schemas.config_loading import load_config, override_config
    from schemas.run_directory import RunDirectory

    if preset is not None or file is not None:
        return load_config(preset, file, settings or [])
    if root is not None and RunDirectory.exists(root):
        return override_config(RunDirectory.open(root).config, settings or [])
    return load_config(DEFAULT_PRESET, None, settings or [])


def open_run(
    root: Path, preset: str | None, file: Path | None, settings: list[str] | None, *, may_start: bool
) -> RunDirectory:
    """The run directory at `root`, started if an option says with which configuration, or with `may_start` in any case.

    Raises ArtifactError when it does not exist and may not be started, ConfigError when it was started with another
    configuration than the options give.
    """
    from rsipo_cli.failures import log_to
    from schemas.run_directory import RunDirectory

    if preset is None and file is None and not settings and not may_start:
        run = RunDirectory.open(root)
    else:
        run = RunDirectory.create(root, resolve_config(root, preset, file, settings))
    log_to(run.log_path)
    return run


def step_in_progress(run: RunDirectory) -> int:
    """The step a stage works on by default: the one after the last step that was trained to its end."""
    trained, saved = run.finished_steps("train_metrics"), run.finished_steps("checkpoints")
    return min(max(trained, default=0), max(saved, default=0)) + 1
