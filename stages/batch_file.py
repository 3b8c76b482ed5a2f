"""A training batch as one safetensors file: for worker processes, and as the artefact of a step that failed.

All arrays of all rows stand end to end; a row's scalars and lengths are JSON in the file's metadata. Nothing is pickled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from schemas.errors import ArtifactError
from stages.learner import TrainingBatch
from stages.packing import TrainRow

VERSION = "1"
_SCALARS = ("kind", "row_id", "advantage", "trust", "skill_reward", "temperature")


def save_batch(path: Path, batch: TrainingBatch, facts: dict[str, Any] | None = None) -> None:
    """Write `batch`; `facts` are JSON facts about it (why it was kept)."""
    from safetensors.numpy import save_file

    rows = []
    for row in batch.rows:
        entry: dict[str, Any] = {name: _plain(getattr(row, name)) for name in _SCALARS}
        entry["tokens"] = len(row.token_ids)
        entry["teacher_tokens"] = None if row.teacher_token_ids is None else len(row.teacher_token_ids)
        rows.append(entry)
    taught = [row for row in batch.rows if row.teacher_token_ids is not None]
    tensors = {
        "token_ids": _joined([row.token_ids for row in batch.rows], np.int32),
        "sampled": _joined([row.sampled for row in batch.rows], np.uint8),
        "behaviour_logprobs": _joined([row.behaviour_logprobs for row in batch.rows], np.float32),
        "teacher_token_ids": _joined([row.teacher_token_ids for row in taught], np.int32),
        "teacher_sampled": _joined([row.teacher_sampled for row in taught], np.uint8),
    }
    head = {"version": VERSION, "lr": batch.lr, "seed": batch.seed, "rows": rows, "facts": facts or {}}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"batch": json.dumps(head)})


def load_batch(path: Path) -> TrainingBatch:
    """Read what `save_batch` wrote. Raises ArtifactError for a damaged file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            head = json.loads(file.metadata()["batch"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        if head["version"] != VERSION:
            raise ValueError(f"version {head['version']}")
        return TrainingBatch(_rows(head["rows"], arrays), head["lr"], head["seed"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError("cannot read a training batch", where=str(path), found=str(error)) from error


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else float(value)


def _joined(arrays: list[Any], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(array, dtype) for array in arrays]) if arrays else np.zeros(0, dtype)


def _rows(entries: list[dict[str, Any]], arrays: dict[str, np.ndarray]) -> list[TrainRow]:
    rows, start, sampled_start, teacher_start = [], 0, 0, 0
    for entry in entries:
        part = slice(start, start + entry["tokens"])
        sampled = arrays["sampled"][part].astype(np.bool_)
        count = int(sampled.sum())
        teacher: dict[str, Any] = {}
        if entry["teacher_tokens"] is not None:
            taught = slice(teacher_start, teacher_start + entry["teacher_tokens"])
            teacher["teacher_token_ids"] = arrays["teacher_token_ids"][taught]
            teacher["teacher_sampled"] = arrays["teacher_sampled"][taught].astype(np.bool_)
            teacher_start = taught.stop
        rows.append(
            TrainRow(
                **{name: entry[name] for name in _SCALARS},
                token_ids=arrays["token_ids"][part],
                sampled=sampled,
                behaviour_logprobs=arrays["behaviour_logprobs"][sampled_start : sampled_start + count],
                **teacher,
            )
        )
        start, sampled_start = part.stop, sampled_start + count
    return rows
