"""A task and a panel of tasks: what an episode starts from, identified by content, in an order no file system decides."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Task:
    """One task of an environment.

    `task_id` is stable across machines (never a file's position in a listing); `task_type` is the pooling key of the
    shrinkage (c(q), method section 2); `text` is the instruction; `payload` is the JSON-serialisable initial state.
    `labels` describe the task in the record (such as a hop class) and decide nothing: they are not part of the hash.
    """

    task_id: str
    task_type: str
    split: str
    text: str
    payload: Mapping[str, Any] = field(repr=False)
    labels: Mapping[str, str] = field(default_factory=dict, repr=False)

    @cached_property
    def sha256(self) -> str:
        """Hash of everything that determines the start of an episode."""
        content = [self.task_id, self.task_type, self.text, dict(self.payload)]
        return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


@dataclass(frozen=True)
class Panel:
    """A fixed list of tasks, sorted by id and hashed. Ids are unique."""

    name: str
    tasks: tuple[Task, ...]

    @classmethod
    def of(cls, name: str, tasks: Sequence[Task]) -> Panel:
        """Sort `tasks` by id into a panel. Raises ConfigError on a duplicate id or an empty list."""
        from schemas.errors import ConfigError

        ordered = tuple(sorted(tasks, key=lambda task: task.task_id))
        if not ordered:
            raise ConfigError("a panel has no task", where=name, remedy="check the path and the filters")
        for left, right in zip(ordered, ordered[1:], strict=False):
            if left.task_id == right.task_id:
                raise ConfigError("a task id occurs twice in a panel", where=name, found=left.task_id)
        return cls(name, ordered)

    @cached_property
    def sha256(self) -> str:
        """Hash of the sorted tasks' hashes: equal panels, equal hash, on every machine."""
        return hashlib.sha256("\n".join(task.sha256 for task in self.tasks).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)
