"""The command `rsipo`: registers the commands and turns every end into an exit code.

Nothing heavy is imported here or by the command modules: each imports its stage when it runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Annotated

import typer

from rsipo_cli import doctor, estimate_gains, evaluate, failures, index, loop, replay, rollout, sft_skills, train_step
from schemas import __version__

# Plain help texts: `[P]` in a help text is not markup, and golden copies do not depend on a terminal's width.
app = typer.Typer(
    name="rsipo",
    help="Train language-model agents with RSIPO, stage by stage or as a loop.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("loop")(loop.loop)
app.command("sft-skills")(sft_skills.sft_skills)
app.command("rollout")(rollout.rollout)
app.command("replay")(replay.replay)
app.command("estimate-gains")(estimate_gains.estimate_gains)
app.command("train-step")(train_step.train_step)
app.command("evaluate")(evaluate.evaluate)
app.command("doctor")(doctor.doctor)
app.add_typer(index.app, name="index")
if importlib.util.find_spec("rsipo_cli.tasks") is not None:
    app.add_typer(importlib.import_module("rsipo_cli.tasks").app, name="tasks")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rsipo {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    sys.exit(failures.guarded(lambda: app(prog_name="rsipo")))


if __name__ == "__main__":
    main()
