"""The panels of a run, and which tasks a step plays.

`tasks.train` and `tasks.evaluate` are resolved once, when the run first needs them, and written to `RUN/panels/`. From then on the run depends on those files alone: a source that changes, or a generator that is improved, never
changes a run that has begun. Which tasks step N plays is a pure function of (seed, step, panel), so there is no iterator
state to save, to restore or to exhaust.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from data.environments import Environment
from data.panel_lines import compressed, encode_lines, read_lines
from data.seeds import derive_seed
from data.tasks import Panel, Task
from schemas.artifacts import FileEntry, Manifest, file_errors, sha256_file, sha256_json, write_file
from schemas.errors import ArtifactError, ConfigError
from schemas.run_directory import RunDirectory

TRAIN = "train"
EVALUATE = "evaluate"


def resolve_panel(run: RunDirectory, name: str, environment: Environment) -> None:
    """Load the source of a panel and publish `RUN/panels/<name>.jsonl.xz` and its record; nothing where it is there.

    The record (`<name>.json`, written last) names the source, the panel's sha256, its number of tasks and the environment's
    version. Raises ConfigError when the source cannot be loaded or holds fewer tasks than one step plays.
    """
    if _record_path(run, name).exists():
        return
    tasks = run.config.tasks
    source = tasks.train if name == TRAIN else tasks.evaluate
    panel = environment.panel(source)
    if name == TRAIN:
        steps_per_epoch(len(panel), tasks.per_step)
    content = encode_panel(panel)
    path = run.panel_path(name)
    write_file(path, content)
    record = Manifest(
        kind="panel",
        inputs={"source": sha256_json({"source": source})},
        files={path.name: FileEntry(sha256_file(path), len(content))},
        extra={
            "source": source,
            "tasks": len(panel),
            "sha256": panel.sha256,
            "environment": {"name": environment.name, "version": environment.version},
        },
    )
    write_file(_record_path(run, name), record.to_bytes())


def _record_path(run: RunDirectory, name: str) -> Path:
    return run.panel_path(name).parent / f"{name}.json"


def is_resolved(run: RunDirectory, name: str) -> bool:
    """Whether the run has this panel."""
    return _record_path(run, name).exists()


def panel_record(run: RunDirectory, name: str) -> dict[str, Any]:
    """What the record says of a panel: `source`, `tasks`, `sha256`, `environment`. Cheap: reads no task."""
    return dict(_record(run, name).extra)


def _record(run: RunDirectory, name: str) -> Manifest:
    path = _record_path(run, name)
    with file_errors(path):
        return Manifest.from_bytes(path.read_bytes(), path, "start a new run directory")


def load_panel(run: RunDirectory, name: str) -> Panel:
    """A panel of the run, checked against its record. Raises ArtifactError when it is damaged or missing."""
    record, path = _record(run, name), run.panel_path(name)
    with file_errors(path):
        found = sha256_file(path)
    expected = record.files[path.name].sha256
    if found != expected:
        raise ArtifactError(
            "a panel of the run is damaged",
            where=str(path),
            expected=f"sha256 {expected[:12]}",
            found=f"sha256 {found[:12]}",
            remedy="copy it back, or start a new run directory",
        )
    return read_lines(path, record.extra["source"])


def encode_panel(panel: Panel) -> bytes:
    """The tasks as JSON lines in panel order, compressed with xz; equal panels give equal bytes."""
    return compressed(encode_lines(panel))


def steps_per_epoch(panel_size: int, per_step: int) -> int:
    """Steps until every task has had its turn; the remainder of an uneven division waits for the next epoch's order."""
    if per_step > panel_size:
        raise ConfigError(
            "the training panel is smaller than one step",
            where="tasks.per_step",
            expected=f"at most {panel_size}, the tasks of tasks.train",
            found=per_step,
            remedy="use a larger panel, or fewer tasks a step",
        )
    return panel_size // per_step


def tasks_of_step(panel: Panel, *, seed: int, step: int, per_step: int) -> list[Task]:
    """The distinct tasks that step `step` (counted from 1) plays, in playing order.

    Each epoch is a permutation derived from (seed, epoch); a step takes its consecutive slice. Within an epoch the task
    types are spread evenly over the steps, because a step that lacks a type teaches that type's statistics nothing.
    """
    if step < 1:
        raise ConfigError("steps that play tasks are counted from 1", where="--step", expected=">= 1", found=step)
    epoch, position = divmod(step - 1, steps_per_epoch(len(panel), per_step))
    order = _spread_permutation(panel, derive_seed(seed, "tasks", epoch))
    return [panel.tasks[index] for index in order[position * per_step : (position + 1) * per_step]]


def _spread_permutation(panel: Panel, seed: int) -> list[int]:
    """A permutation in which every stretch holds each type about in proportion: shuffle within types, then interleave."""
    generator = np.random.Generator(np.random.PCG64(seed))
    by_type: dict[str, list[int]] = defaultdict(list)
    for index, task in enumerate(panel):
        by_type[task.task_type].append(index)
    places: list[tuple[float, int]] = []
    for name in sorted(by_type):
        members = [by_type[name][i] for i in generator.permutation(len(by_type[name]))]
        # The i-th of n members sits near (i + u) / n of the epoch; one u a type keeps members equally far apart.
        offset = float(generator.random())
        places += [((rank + offset) / len(members), index) for rank, index in enumerate(members)]
    return [index for _, index in sorted(places)]
