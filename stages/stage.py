"""What every stage shares: the question whether work is owed, the result, and the stopwatch."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from schemas.artifacts import read_manifest
from schemas.errors import ArtifactError
from schemas.run_directory import RunDirectory
from schemas.table_io import clear_step, rebuild_command, stage_status, write_loose_part


@dataclass(frozen=True)
class StageResult:
    """What a stage's `run` returns: `summary` holds plain figures for the closing table and `--json`."""

    stage: str
    step: int
    state: Literal["done", "up_to_date"]
    summary: dict[str, Any] = field(default_factory=dict)


def open_stage(
    run: RunDirectory,
    stage: str,
    step: int,
    tables: Sequence[str],
    inputs: Mapping[str, str],
    force: bool,
    needs: Callable[[], object] | None = None,
) -> bool:
    """Whether the step is owed: True for work to do, False when it is complete and made from these inputs.

    A stale or damaged step raises ArtifactError that names the changed inputs, or with `force` is cleared and owed. With
    `force` a step that is up to date is also compared byte by byte with its manifests. `needs` raises when the step could
    not be made again (its weights are gone); it is asked before anything is removed. Call it under the lock.
    """
    needs = needs or (lambda: None)
    try:
        status = stage_status(run, tables, step, inputs)
        if force and status.state == "complete":
            for name in tables:
                read_manifest(run.step_dir(name, step))
    except ArtifactError:
        if not force:
            raise
        needs()
        clear_step(run, tables, step)
        return True
    if status.state == "complete":
        return False
    if status.state == "absent":
        return True
    if not force:
        raise ArtifactError(
            f"step {step} of {stage} is stale",
            where=str(run.step_dir(tables[-1], step)),
            found=f"changed inputs: {'; '.join(status.changed)}",
            remedy=rebuild_command(run, tables[-1], step),
        )
    needs()
    clear_step(run, tables, step)
    return True


class Stopwatch:
    """Wall-clock figures of one attempt at a stage, written to the table `timings` when the block ends well.

    Timings are in no manifest, since they differ from run to run: one file per attempt.
    """

    def __init__(
        self, run: RunDirectory, step: int, stage: str, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._run, self._stage, self._step, self._clock = run, stage, step, clock
        self._attempt = uuid.uuid4().hex
        self._values: dict[str, float] = {}
        self._start = clock()

    def add(self, name: str, value: float) -> None:
        """Add to a figure: seconds, or a count such as `tokens`."""
        self._values[name] = self._values.get(name, 0.0) + float(value)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to the figure `name`."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    @property
    def seconds(self) -> float:
        """Seconds since the stopwatch was made."""
        return self._clock() - self._start

    def write(self) -> None:
        """Publish the figures, `total_seconds` last."""
        figures = {**self._values, "total_seconds": self.seconds}
        facts = {"step": self._step, "stage": self._stage, "attempt": self._attempt}
        rows = [{**facts, "name": name, "value": value} for name, value in figures.items()]
        write_loose_part(self._run, "timings", self._step, self._attempt, rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.write()
