"""Panels as files: JSON lines, one game a line, plain or `.xz`; read strictly, written all or nothing.

A line holds `id`, `split`, `task_type`, `task` (the instruction), `pddl_params`, `scene` and `pddl_problem`; generated
games add `size` and `generator`. Every other field is kept with the game. Blank lines are skipped.
"""

from __future__ import annotations

import json
import lzma
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data.household.catalog import TASK_TYPES
from data.tasks import Panel, Task
from schemas.errors import ArtifactError

TEXT_FIELDS = ("id", "split", "task_type", "task", "scene", "pddl_problem")
PARAMETERS: Mapping[str, type] = {
    "object_target": str,
    "parent_target": str,
    "toggle_target": str,
    "mrecep_target": str,
    "object_sliced": bool,
}
REMEDY = "write the panel again with `rsipo tasks generate`, or fix the line"


def read_panel(path: Path) -> list[Task]:
    """The games of one file, in its order. Raises ArtifactError naming file, line and field."""
    tasks: list[Task] = []
    first_seen: dict[str, int] = {}
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        task = parse_row(_object(line, where), where)
        if task.task_id in first_seen:
            raise ArtifactError(
                "a game id occurs twice",
                where=f"{where}, field id",
                expected=f"an id other than that of line {first_seen[task.task_id]}",
                found=repr(task.task_id),
                remedy="drop or rename one of the two lines",
            )
        first_seen[task.task_id] = number
        tasks.append(task)
    if not tasks:
        raise ArtifactError("the panel file holds no game", where=str(path), expected="one JSON object a line")
    return tasks


def write_panel(panel: Panel, path: Path) -> None:
    """Write a panel, compressed when the name ends in `.xz`; the file appears whole or not at all.

    Equal panels give equal bytes. Raises ArtifactError when the place cannot be written.
    """
    path = Path(path)
    data = "".join(json.dumps(row_of(task), ensure_ascii=False) + "\n" for task in panel).encode()
    if path.suffix == ".xz":
        data = lzma.compress(data)
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise ArtifactError(
            "cannot write the panel", where=str(path), found=error.strerror or str(error), remedy="choose another place"
        ) from error


def row_of(task: Task) -> dict[str, Any]:
    """The JSON object of one game."""
    head = {"id": task.task_id, "split": task.split, "task_type": task.task_type, "task": task.text}
    return head | dict(task.payload)


def parse_row(row: Mapping[str, Any], where: str) -> Task:
    """One JSON object as a game. Raises ArtifactError that names `where` and the field at fault."""
    for name in TEXT_FIELDS:
        value = _field(row, name, where)
        if not isinstance(value, str) or not value.strip():
            raise _wrong(where, name, "a text that is not empty", value)
    if row["task_type"] not in TASK_TYPES:
        raise _wrong(where, "task_type", f"one of {', '.join(TASK_TYPES)}", row["task_type"])
    _check_parameters(_field(row, "pddl_params", where), row["task_type"], where)
    _check_problem(row["pddl_problem"], where)
    payload = {name: value for name, value in row.items() if name not in ("id", "split", "task_type", "task")}
    return Task(row["id"], row["task_type"], row["split"], row["task"], payload)


def _check_parameters(parameters: Any, task_type: str, where: str) -> None:
    if not isinstance(parameters, Mapping):
        raise _wrong(where, "pddl_params", "an object", parameters)
    for name, kind in PARAMETERS.items():
        value = _field(parameters, name, where, inside="pddl_params.")
        if not isinstance(value, kind):
            raise _wrong(where, f"pddl_params.{name}", "true or false" if kind is bool else "a text", value)
    needed = "toggle_target" if task_type == "look_at_obj_in_light" else "parent_target"
    for name in ("object_target", needed):
        if not parameters[name]:
            raise _wrong(where, f"pddl_params.{name}", f"a class name, which {task_type} needs", parameters[name])


def _check_problem(text: str, where: str) -> None:
    """The cheap signs of a whole PDDL problem; the driver reads the rest when the game is loaded."""
    for part in ("(define", "(:domain alfred)", "(:objects", "(:init", "(:goal"):
        if part not in text:
            raise _wrong(where, "pddl_problem", f"a PDDL problem with {part} ...", f"{text.strip()[:40]!r} ...")
    opened, closed = text.count("("), text.count(")")
    if opened != closed:
        raise _wrong(where, "pddl_problem", "as many ( as )", f"{opened} ( and {closed} )")


def _field(row: Mapping[str, Any], name: str, where: str, inside: str = "") -> Any:
    if name not in row:
        raise ArtifactError(
            "a field is missing",
            where=f"{where}, field {inside}{name}",
            expected=f"the field {inside}{name}",
            found=", ".join(sorted(map(str, row))) or "no field",
            remedy=REMEDY,
        )
    return row[name]


def _wrong(where: str, field: str, expected: str, found: Any) -> ArtifactError:
    shown = found if isinstance(found, str) else repr(found)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ArtifactError(
        "a field is malformed", where=f"{where}, field {field}", expected=expected, found=shown or "''", remedy=REMEDY
    )


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            "a line is not JSON", where=where, expected="one JSON object", found=str(error), remedy=REMEDY
        ) from error
    if not isinstance(row, dict):
        raise ArtifactError(
            "a line is not a game", where=where, expected="one JSON object", found=type(row).__name__, remedy=REMEDY
        )
    return row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1. A damaged file fails with the line it broke at."""
    opener = lzma.open if path.suffix == ".xz" else open
    number = 0
    try:
        with opener(path, "rb") as stream:
            for number, raw in enumerate(stream, start=1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if line.strip():
                    yield number, line
    except FileNotFoundError as error:
        raise ArtifactError("no such panel file", where=str(path), remedy="check the path") from error
    except UnicodeDecodeError as error:
        raise ArtifactError(
            "a line is not text", where=f"{path}, line {number}", expected="UTF-8", found=str(error), remedy=REMEDY
        ) from error
    except (EOFError, lzma.LZMAError) as error:
        raise ArtifactError(
            "the compressed panel is damaged",
            where=f"{path}, line {number + 1}",
            expected="a whole .xz stream",
            found=str(error),
            remedy="copy or write the file again",
        ) from error
    except OSError as error:
        raise ArtifactError("cannot read the panel", where=str(path), found=error.strerror or str(error)) from error
