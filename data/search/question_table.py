"""The question table: every question panel of the search environment is one Parquet file of this schema.

Rows are in the order of their ids, so that equal panels give equal bytes. Each row carries the hash of its task, which is
checked when it is read: a table that was edited by hand is no longer the panel it says it is.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.search.scoring import normalise
from data.tasks import Panel, Task
from schemas.artifacts import file_errors, write_file
from schemas.errors import ArtifactError

NAME = "questions"
VERSION = 1
TEXT = pa.large_string()
REMEDY = "build it again with `rsipo tasks build`"

SCHEMA = pa.schema(
    [
        pa.field("task_id", TEXT, nullable=False),
        pa.field("data_set", TEXT, nullable=False),
        pa.field("question", TEXT, nullable=False),
        pa.field("answers", pa.large_list(pa.field("element", TEXT, nullable=False)), nullable=False),
        pa.field("split", TEXT, nullable=False),
        pa.field("hops", TEXT),  # null where the set does not say
        pa.field("corpus", TEXT),  # sha256 of the passages that hold the answer; null for the open sets
        pa.field("sha256", TEXT, nullable=False),
    ],
    metadata={"rsipo.table": NAME, "rsipo.version": str(VERSION)},
)


def write_questions(tasks: Sequence[Task], path: Path | str) -> None:
    """Write tasks as one table; the file has its old content or all of the new one, and equal tasks give equal bytes.

    Raises ConfigError for no task or an id that occurs twice, ArtifactError for a task that is no question or a place that
    cannot be written.
    """
    path = Path(path)
    panel = Panel.of(str(path), list(tasks))
    rows = [_row_of(task) for task in panel]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), buffer, compression="zstd", write_page_checksum=True)
    write_file(path, buffer.getvalue())


def _row_of(task: Task) -> dict[str, Any]:
    answers = task.payload.get("answers")
    if not _are_answers(answers) or set(task.payload) - {"answers", "corpus"}:
        raise ArtifactError(
            "a task is no question",
            where=task.task_id,
            expected="a payload of answers and at most a corpus",
            found=", ".join(sorted(task.payload)) or "nothing",
        )
    return {
        "task_id": task.task_id,
        "data_set": task.task_type,
        "question": task.text,
        "answers": list(answers),
        "split": task.split,
        "hops": task.labels.get("hops"),
        "corpus": task.payload.get("corpus"),
        "sha256": task.sha256,
    }


def _are_answers(answers: Any) -> bool:
    return isinstance(answers, list | tuple) and bool(answers) and all(isinstance(text, str) for text in answers)


def read_questions(path: Path | str) -> list[Task]:
    """The tasks of a table, in the order of its rows.

    Raises ArtifactError for a file that is missing, damaged, another table or of another version, and for a row without a
    question or a gold answer, with a repeated id, or whose hash is not that of its task.
    """
    path = Path(path)
    tasks: list[Task] = []
    first: dict[str, int] = {}
    for number, row in enumerate(_table(path).to_pylist(), start=1):
        where = f"{path}, row {number}"
        task = _task_of(row)
        if task.task_id in first:
            raise ArtifactError("a question id occurs twice", where=where, found=repr(task.task_id), remedy=REMEDY)
        if not task.text.strip():
            raise ArtifactError("a question has no text", where=f"{where}, column question", remedy=REMEDY)
        if not any(normalise(answer) for answer in task.payload["answers"]):
            raise ArtifactError("a question has no gold answer", where=f"{where}, column answers", remedy=REMEDY)
        if task.sha256 != row["sha256"]:
            raise ArtifactError(
                "a question is not the one its hash names",
                where=f"{where}, column sha256",
                expected=task.sha256[:12],
                found=str(row["sha256"])[:12],
                remedy=REMEDY,
            )
        first[task.task_id] = number
        tasks.append(task)
    if not tasks:
        raise ArtifactError("the question table holds no question", where=str(path), remedy=REMEDY)
    return tasks


def _task_of(row: dict[str, Any]) -> Task:
    payload: dict[str, Any] = {"answers": row["answers"]}
    if row["corpus"] is not None:
        payload["corpus"] = row["corpus"]
    labels = {} if row["hops"] is None else {"hops": row["hops"]}
    return Task(row["task_id"], row["data_set"], row["split"], row["question"], payload, labels)


def _table(path: Path) -> pa.Table:
    with file_errors(path):
        if not path.is_file():
            raise ArtifactError("no such question table", where=str(path), remedy="check the path, or " + REMEDY)
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                _check_schema(file.schema_arrow, path)
                return file.read()
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:  # whatever pyarrow says of damaged headers
            raise ArtifactError(
                "the question table cannot be read", where=str(path), found=str(error), remedy=REMEDY
            ) from error


def _check_schema(found: pa.Schema, path: Path) -> None:
    facts = found.metadata or {}
    table, version = facts.get(b"rsipo.table"), facts.get(b"rsipo.version")
    if table != NAME.encode():
        raise ArtifactError(
            "the file is no question table",
            where=str(path),
            expected=", ".join(SCHEMA.names),
            found=", ".join(found.names),
            remedy=f"read a data set with sets:NAME:SPLIT={path}",
        )
    if version != str(VERSION).encode() or not found.equals(SCHEMA):
        raise ArtifactError(
            "the question table has another schema than this release",
            where=str(path),
            expected=f"version {VERSION} with {', '.join(SCHEMA.names)}",
            found=f"version {(version or b'none').decode(errors='replace')} with {', '.join(found.names)}",
            remedy=REMEDY,
        )
