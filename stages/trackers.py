"""Trackers: where a loop's figures go besides the record. None is needed: every figure is in the run's own tables.

A tracker is `jsonl` or an import string `module:Class` in `run.trackers`. It is told an explicit step with every set of
figures and a new attempt id at every start, because a resumed run may report a step again. A tracker that fails is dropped
with a note; it never stops a training.
"""

from __future__ import annotations

import importlib
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from data.progress import Reporter
from schemas.errors import ConfigError

BUILTIN = {"jsonl": "stages.trackers:JsonLines"}


class Tracker(Protocol):
    """Constructed without arguments; called from the loop's process only."""

    def start(self, root: Path, config: Mapping[str, Any], attempt: str) -> None:
        """A loop on the run directory `root` begins; `attempt` is new every time."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures named `stage/figure` of one finished stage of `step`. A step may come again in a later attempt."""

    def finish(self) -> None:
        """The loop has ended."""


class JsonLines:
    """One line per finished stage in `RUN/logs/figures-<attempt>.jsonl`: step and figures."""

    def start(self, root: Path, config: Mapping[str, Any], attempt: str) -> None:
        del config
        self._path = root / "logs" / f"figures-{attempt}.jsonl"
        self._path.parent.mkdir(exist_ok=True)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")

    def finish(self) -> None:
        """Nothing is held open."""


def build_tracker(name: str) -> Tracker:
    """The tracker of a built-in name or `module:Class`. Raises ConfigError when it cannot be imported or built."""
    module_name, _, attribute = BUILTIN.get(name, name).partition(":")
    try:
        tracker: Tracker = getattr(importlib.import_module(module_name), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            "cannot build the tracker",
            where="run.trackers",
            expected=f"{', '.join(BUILTIN)} or module:Class",
            found=f"{name} ({error})",
        ) from error
    return tracker


class Trackers:
    """All trackers of a loop, told together. One that raises is dropped, and the reporter says so."""

    def __init__(self, names: Sequence[str], reporter: Reporter) -> None:
        self._trackers = {name: build_tracker(name) for name in names}
        self._reporter = reporter

    def start(self, root: Path, config: Mapping[str, Any]) -> None:
        attempt = uuid.uuid4().hex[:12]
        self._tell("start", root, config, attempt)

    def log(self, step: int, stage: str, summary: Mapping[str, Any]) -> None:
        """Report the numbers of a stage's summary; texts, tables and nulls stay in the record."""
        figures = {
            f"{stage}/{name}": float(value)
            for name, value in summary.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        self._tell("log", step, figures)

    def finish(self) -> None:
        self._tell("finish")

    def _tell(self, method: str, *arguments: Any) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:
                del self._trackers[name]
                self._reporter.note(f"tracker {name} failed and is dropped: {type(error).__name__}: {error}")
