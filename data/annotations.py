"""Annotated skills: JSON lines of finished trajectories and what a stronger model wrote about them.

Three forms of a line are accepted, and may be mixed:
- our own: `{"task_id", "task_type", "task", "success", "trajectory": [{"observation", "reply"}, ...], "summary", "skill"}`;
  `type` may stand for `task_type`, `task` may be missing where the first observation names the task, and a last entry
  without `reply` (or `final_observation`) is what the world said at the end;
- `{"prompt": text, "response": text}`;
- `{"messages": [{"role", "content"}, ...]}`, an optional system message, then user and assistant in turns, assistant last.

Nothing is dropped silently: a line becomes an annotation, or a rejection with its number and reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.environments import Observation, Turn
from data.tasks import Task
from schemas.errors import ArtifactError

_TASK_LINE = re.compile(r"Your task is to:\s*(.+?)\s*$", re.MULTILINE)
_MISSING = frozenset({"", "none", "nan", "null"})


@dataclass(frozen=True)
class TrajectoryRequest:
    """A finished episode, from which the environment's own wording of the request is made."""

    task: Task
    turns: tuple[Turn, ...]
    final: Observation
    won: bool


@dataclass(frozen=True)
class ChatRequest:
    """A conversation that ends before the assistant's answer: user and assistant texts in turns, the system text apart."""

    system: str | None
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Annotation:
    """One accepted line: what is asked, and the answer to learn. `won` and `group` (the task) where they are known."""

    line: int
    request: TrajectoryRequest | ChatRequest
    response: str
    won: bool | None = None
    group: str | None = None


@dataclass(frozen=True)
class Rejection:
    """One line that is not used, and why."""

    line: int
    reason: str


class _Refused(Exception):
    """A line that holds no annotation; the text is the reason."""


def read_annotations(path: Path, action_of: Callable[[str], str | None]) -> tuple[list[Annotation], list[Rejection]]:
    """The accepted and the rejected lines of a file, each in the order of the file; blank lines are skipped.

    `action_of` reads the action from a raw reply (None: it holds no valid one). Raises ArtifactError for a file that
    cannot be read, is not UTF-8, or has no line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        found = error.strerror if isinstance(error, OSError) else "text that is not UTF-8"
        raise ArtifactError(
            "cannot read the annotations", where=str(path), found=found, remedy="give a file of JSON lines"
        ) from error
    accepted: list[Annotation] = []
    rejected: list[Rejection] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            accepted.append(_annotation(number, _object(line), action_of))
        except _Refused as refused:
            rejected.append(Rejection(number, str(refused)))
    if not accepted and not rejected:
        raise ArtifactError("the annotations are empty", where=str(path), expected="JSON lines", found="no line")
    return accepted, rejected


def _object(line: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _Refused(f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise _Refused(f"not a JSON object but {type(value).__name__}")
    return value


def _annotation(number: int, value: Mapping[str, Any], action_of: Callable[[str], str | None]) -> Annotation:
    if "messages" in value:
        request, response = _messages(value["messages"])
        return Annotation(number, request, response)
    if "prompt" in value or "response" in value:
        prompt, response = _text(value, "prompt"), _text(value, "response")
        return Annotation(number, ChatRequest(None, (prompt,)), response)
    if "trajectory" in value:
        return _own_form(number, value, action_of)
    raise _Refused("none of the forms: it needs `trajectory`, `prompt` and `response`, or `messages`")


def _text(value: Mapping[str, Any], *names: str) -> str:
    name = next((name for name in names if name in value), None)
    if name is None:
        raise _Refused(f"`{names[0]}` is missing")
    text = value[name]
    if not isinstance(text, str) or text.strip().lower() in _MISSING:
        raise _Refused(f"`{name}` is not text")
    return text


def _messages(messages: object) -> tuple[ChatRequest, str]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _Refused("`messages` is not a list of objects")
    texts = [_text(message, "content") for message in messages]
    roles = [message.get("role") for message in messages]
    system = texts.pop(0) if roles[:1] == ["system"] else None
    spoken = roles[1:] if system is not None else roles
    expected = ["user", "assistant"] * (len(spoken) // 2)
    if not spoken or spoken != expected:
        raise _Refused("`messages` must be user and assistant in turns, the assistant last")
    return ChatRequest(system, tuple(texts[:-1])), texts[-1]


def _own_form(number: int, value: Mapping[str, Any], action_of: Callable[[str], str | None]) -> Annotation:
    won = value.get("success")
    if not isinstance(won, bool):
        raise _Refused("`success` is not true or false")
    turns, final = _trajectory(value, action_of)
    task_id, task_type = _text(value, "task_id"), _text(value, "task_type", "type")
    task = Task(task_id, task_type, "annotated", _task_text(value, turns), {})
    answer = {"summary": _text(value, "summary"), "skill": _text(value, "skill")}
    request = TrajectoryRequest(task, turns, final, won)
    return Annotation(number, request, json.dumps(answer, ensure_ascii=False), won, task_id)


def _trajectory(
    value: Mapping[str, Any], action_of: Callable[[str], str | None]
) -> tuple[tuple[Turn, ...], Observation]:
    entries = value["trajectory"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _Refused("`trajectory` is not a list of objects")
    final = str(value.get("final_observation") or "")
    if entries and "reply" not in entries[-1]:
        final = _text(entries[-1], "observation")
        entries = entries[:-1]
    if not entries:
        raise _Refused("`trajectory` has no turn")
    turns = []
    for entry in entries:
        reply = _text(entry, "reply")
        turns.append(Turn(_text(entry, "observation"), reply, action_of(reply)))
    return tuple(turns), Observation(final)


def _task_text(value: Mapping[str, Any], turns: Sequence[Turn]) -> str:
    if "task" in value:
        return _text(value, "task")
    found = _TASK_LINE.search(turns[0].observation)
    if not found:
        raise _Refused("`task` is missing, and the first observation does not name it")
    return found[1]
