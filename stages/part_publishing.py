"""A stage's work cut into fixed parts: play one, publish it, go on; what an earlier attempt published is not played again.

What a part holds depends on the configuration alone, so a part that is owed after a crash is played in a batch of the
same shape and ends with the same bits. A crash costs at most the part it interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from data.progress import Reporter
from schemas.artifacts import Manifest, sha256_json
from schemas.errors import EnvironmentFault
from schemas.run_directory import RunDirectory
from schemas.table_io import clear_step, finish_step, parts_done, read_parts, write_part
from stages.reports import ERROR_STOPS

Rows = list[dict[str, Any]]
Item = TypeVar("Item")


def chunks(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Consecutive slices of `size`; the last may be shorter.

    >>> chunks([1, 2, 3], 2)
    [[1, 2], [3]]
    """
    return [items[start : start + size] for start in range(0, len(items), size)]


def publish_parts(
    run: RunDirectory,
    step: int,
    tables: Sequence[str],
    *,
    inputs: Mapping[str, str],
    parts: Sequence[Sequence[Item]],
    play: Callable[[Sequence[Item]], Mapping[str, Rows]],
    units: Callable[[Sequence[Item]], int],
    reporter: Reporter,
    shape: int | None = None,
) -> int:
    """Play and publish every owed part, in order; returns how many were found done.

    `play(part)` gives the rows of every table in `tables`; `units(part)` is the progress that one part stands for.
    `shape` is anything besides `inputs` that decides what a part holds: parts of another shape are owed again.
    """
    inputs_sha256 = sha256_json({"inputs": dict(inputs), "shape": shape})
    done = parts_done(run, tables, step, inputs_sha256)
    for number, part in enumerate(parts):
        if number in done:
            reporter.advance(units(part))
            continue
        rows = play(part)
        write_part(run, step, number, {table: rows[table] for table in tables}, inputs_sha256)
    return len(done & set(range(len(parts))))


def finish_parts(
    run: RunDirectory, step: int, tables: Sequence[str], *, kind: str, inputs: Mapping[str, str], extra: dict[str, Any]
) -> Manifest:
    """Publish the step's manifests: from here on the stage is complete."""
    return finish_step(run, tables, step, kind=kind, inputs=dict(inputs), extra=extra)


def check_error_share(run: RunDirectory, step: int, tables: Sequence[str], *, limit: float, stage: str) -> None:
    """Raise EnvironmentFault when more than `limit` of the step's episodes ended in an environment error.

    `tables` are the stage's, the episodes in the last one. The step is then cleared, so that the next attempt plays it again.
    """
    rows = read_parts(run, tables[-1], step, columns=["stop_reason", "error"]).to_pylist()
    errors = [str(row["error"]) for row in rows if row["stop_reason"] in ERROR_STOPS]
    if len(errors) <= limit * len(rows):
        return
    clear_step(run, tables, step)
    raise EnvironmentFault(
        f"too many episodes of {stage} ended in an environment error",
        where="env.max_error_share",
        expected=f"at most {limit:.0%}",
        found=f"{len(errors)} of {len(rows)}, the first: {errors[0][:600]!r}",
        remedy="repair the environment and run the same command again",
    )
