"""Panels of any environment as JSON lines: one task a line with all its fields, in panel order."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

from data.tasks import Panel, Task
from schemas.artifacts import write_file
from schemas.errors import ArtifactError


def encode_lines(panel: Panel) -> bytes:
    """The tasks as JSON lines, not compressed; equal panels give equal bytes."""
    lines = [json.dumps(_fields(task), sort_keys=True, ensure_ascii=False) for task in panel]
    return ("\n".join(lines) + "\n").encode()


def _fields(task: Task) -> dict[str, Any]:
    fields = {**vars(task), "payload": dict(task.payload), "labels": dict(task.labels)}
    return {name: fields[name] for name in Task.__dataclass_fields__ if name != "labels" or task.labels}


def compressed(lines: bytes) -> bytes:
    """The bytes as an `.xz` stream with fixed settings."""
    return lzma.compress(lines, preset=6)


def write_lines(panel: Panel, path: Path) -> None:
    """Write a panel, compressed when the name ends in `.xz`; the file appears whole or not at all."""
    lines = encode_lines(panel)
    write_file(path, compressed(lines) if path.suffix == ".xz" else lines)


def read_lines(path: Path, name: str | None = None) -> Panel:
    """The panel of a file that `write_lines` wrote, named `name` or after the file.

    Raises ArtifactError naming the file, and the line that is no task.
    """
    try:
        content = path.read_bytes()
        lines = (lzma.decompress(content) if path.suffix == ".xz" else content).decode().split("\n")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ArtifactError("cannot read a panel", where=str(path), found=str(error)) from error
    tasks = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            tasks.append(Task(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ArtifactError("damaged task in a panel", where=f"{path}, line {number}", found=str(error)) from error
    return Panel.of(name or str(path), tasks)
