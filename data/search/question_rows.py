"""Rows of a question set become tasks: one question, its gold answers, a stable id and a hop class.

What is wrong with a row is one sentence with the place of the row. What is left out on purpose is counted.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from data.search.question_sets import Layout, QuestionSet, Row, has, value_of
from data.search.scoring import normalise
from data.tasks import Task
from schemas.errors import ArtifactError

# TriviaQA writes this where the answers of a split are not public.
WITHHELD = "<unk>"


@dataclass
class Leftovers:
    """How many rows of a set did not become a task of their own, by reason."""

    rows: int = 0
    repeated: int = 0
    joined: int = 0
    unanswerable: int = 0
    bad: int = 0

    def notes(self) -> list[str]:
        """A sentence for each kind that occurred."""
        reasons = (
            (self.repeated, "the same question and answers again were left out"),
            (self.joined, "a question that occurs with other answers were joined with it"),
            (self.unanswerable, "no answer in their corpus, as the set says, were left out"),
            (self.bad, "no usable question or answer were left out, as bad=skip asks"),
        )
        return [f"{count} of {self.rows} rows with {reason}" for count, reason in reasons if count]


class _BadRow(Exception):
    """Why a row is no question: what, where in the row, expected, found."""

    def __init__(self, what: str, column: str, expected: str, found: object) -> None:
        super().__init__(what)
        self.what, self.column, self.expected, self.found = what, column, expected, found


def tasks_of(
    rows: Iterable[tuple[str, Row]], questions: QuestionSet, split: str, *, where: str, skip_bad: bool = False
) -> tuple[list[Task], Leftovers]:
    """The tasks of a set, in the order of its rows, and what was left out.

    `rows` are pairs of a place (for messages) and a row, `where` is the place of them all; the first row decides the layout. A row with an id that occurred
    is dropped when it says the same and an error when it does not; where the set has no ids, the answers of equal questions
    are joined. Rows that MuSiQue calls unanswerable are dropped, and with `skip_bad` those without a usable question or
    answer. Raises ArtifactError for columns of another layout, for a bad row and where nothing is left.
    """
    found: dict[str, Task] = {}
    places: dict[str, str] = {}
    left = Leftovers()
    layout: Layout | None = None
    for place, row in rows:
        left.rows += 1
        layout = layout or _layout(questions, row, place)
        if _says_unanswerable(row):
            left.unanswerable += 1
            continue
        try:
            task = _task(row, layout, questions, split)
        except _BadRow as bad:
            if not skip_bad:
                raise _sentence(bad, place) from None
            left.bad += 1
            continue
        _add(task, found, places, place, layout, left)
    if not found:
        raise ArtifactError("the data set holds no question", where=where, found="; ".join(left.notes()) or "no row")
    return list(found.values()), left


def subsample(tasks: list[Task], count: int, seed: int) -> list[Task]:
    """`count` tasks chosen by the hash of their ids and `seed`: the order of the rows and other rows change nothing."""

    def rank(task: Task) -> bytes:
        return hashlib.sha256(f"{seed}\n{task.task_id}".encode()).digest()

    return heapq.nsmallest(count, tasks, key=rank)


def _layout(questions: QuestionSet, row: Row, place: str) -> Layout:
    layout = questions.layout_of(row)
    if layout is None:
        raise ArtifactError(
            f"the columns are not those of {questions.name}",
            where=place,
            expected=", or ".join(layout.wanted for layout in questions.layouts),
            found=", ".join(_names(row)) or "no column",
            remedy="name them with question=..., answers=... and id=...",
        )
    return layout


def _names(row: Row) -> Iterator[str]:
    """Columns with their nested fields one level down, as a mapping would name them."""
    for name, value in row.items():
        yield from (f"{name}.{inner}" for inner in value) if isinstance(value, Mapping) and value else (str(name),)


def _says_unanswerable(row: Row) -> bool:
    return value_of(row, "answerable") is False or value_of(row, "metadata.answerable") is False


def _task(row: Row, layout: Layout, questions: QuestionSet, split: str) -> Task:
    question = _question(row, layout)
    answers = _answers(row, layout)
    own = _own_id(row, layout, question)
    hops = _named_hops(row, layout.hops) if layout.hops else questions.hops(row)
    return Task(
        task_id=f"{questions.name}/{split}/{own}",
        task_type=questions.name,
        split=split,
        text=question,
        payload={"answers": answers},
        labels={} if hops is None else {"hops": hops},
    )


def _question(row: Row, layout: Layout) -> str:
    question = value_of(row, layout.question)
    if not isinstance(question, str) or not question.strip():
        raise _BadRow("a question has no text", layout.question, "a text", question)
    _expect_characters(question, layout.question)
    return " ".join(question.split())


def _answers(row: Row, layout: Layout) -> list[str]:
    """The distinct gold answers in their order; those that the scoring reduces to nothing match nothing and are dropped."""
    texts: dict[str, None] = {}
    for path in layout.answers:
        for text in _texts(value_of(row, path), path, layout.json_answers):
            texts.setdefault(" ".join(text.split()))
    golds = [text for text in texts if text != WITHHELD and normalise(text)]
    if not golds:
        raise _BadRow(
            "a question has no gold answer",
            layout.answers[0],
            "a text that is more than articles and punctuation",
            value_of(row, layout.answers[0]),
        )
    return golds


def _texts(value: Any, path: str, json_answers: bool) -> list[str]:
    if json_answers and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _BadRow("the gold answers are no JSON list", path, "a JSON list of texts", value) from None
    values = [] if value is None else value if isinstance(value, list | tuple) else [value]
    for text in values:
        if not isinstance(text, str):
            raise _BadRow("a gold answer is not a text", path, "a text or a list of texts", text)
        _expect_characters(text, path)
    return list(values)


def _expect_characters(text: str, path: str) -> None:
    """JSON can escape half a character, which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _BadRow("a text holds half a character", path, "whole Unicode characters", text) from None


def _own_id(row: Row, layout: Layout, question: str) -> str:
    if not layout.ids:
        return hashlib.sha256(question.encode()).hexdigest()[:16]
    path = next((path for path in layout.ids if has(row, path)), layout.ids[0])
    own = value_of(row, path)
    if isinstance(own, bool) or not isinstance(own, str | int) or not str(own).strip():
        raise _BadRow("a question has no id", path, "a text or a whole number", own)
    _expect_characters(str(own), path)
    return str(own).strip()


def _named_hops(row: Row, path: str) -> str:
    hops = value_of(row, path)
    if isinstance(hops, bool) or not isinstance(hops, str | int) or not str(hops).strip():
        raise _BadRow("a question has no hop class", path, "a number, or a text such as 2+", hops)
    return str(hops).strip()


def _add(
    task: Task, found: dict[str, Task], places: dict[str, str], place: str, layout: Layout, left: Leftovers
) -> None:
    old = found.get(task.task_id)
    if old is None:
        found[task.task_id] = task
        places[task.task_id] = place
    elif old.sha256 == task.sha256:
        left.repeated += 1
    elif not layout.ids and old.text == task.text:
        # Sorted, so that the order of the rows does not decide the hash.
        answers = sorted({*old.payload["answers"], *task.payload["answers"]})
        found[task.task_id] = replace(old, payload={"answers": answers})
        left.joined += 1
    else:
        raise ArtifactError(
            "a question id occurs twice with another question or other answers",
            where=place,
            expected=f"an id other than that of {places[task.task_id]}",
            found=repr(task.task_id),
            remedy="drop or rename one of the two rows",
        )


def _sentence(bad: _BadRow, place: str) -> ArtifactError:
    shown = repr(bad.found)
    return ArtifactError(
        bad.what,
        where=f"{place}, column {bad.column}",
        expected=bad.expected,
        found=shown if len(shown) <= 80 else shown[:77] + "...",
        remedy="correct the row, or leave such rows out with bad=skip",
    )
