"""What can be wrong with a panel of questions beyond its form, and how much of it an index can answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from data.retrieval import Hit, Retriever
from data.search.scoring import normalise
from data.tasks import Task
from schemas.errors import EnvironmentFault

QUERIES_AT_ONCE = 64


def question_faults(task: Task) -> list[str]:
    """Why a question cannot be used; nothing when it can."""
    faults = []
    if not normalise(task.text):
        faults.append("the question is nothing but articles and punctuation")
    answers = task.payload.get("answers") or []
    empty = [answer for answer in answers if not (isinstance(answer, str) and normalise(answer))]
    if not answers:
        faults.append("there is no gold answer")
    for answer in empty:
        faults.append(f"the gold answer {answer!r} is nothing but articles and punctuation")
    return faults


def repeated_questions(tasks: Iterable[Task]) -> list[tuple[Task, Task]]:
    """Pairs of tasks that ask the same, each later one with the first; across data sets and splits."""
    first: dict[str, Task] = {}
    pairs = []
    for task in tasks:
        earlier = first.setdefault(normalise(task.text), task)
        if earlier is not task:
            pairs.append((earlier, task))
    return pairs


@dataclass(frozen=True)
class Recall:
    """Of `asked` questions of a data set, how many have a gold answer in the passages found for the question itself."""

    data_set: str
    asked: int
    found: int

    @property
    def share(self) -> float:
        return self.found / self.asked


def recall_by_set(
    retriever: Retriever, tasks: Sequence[Task], topk: int, *, advance: Callable[[int], object] = lambda questions: None
) -> list[Recall]:
    """The recall of each data set, sorted by its name; `advance` is told of questions as they are done.

    The question itself is the query, and a passage answers when it holds a gold answer, both normalised, as whole words.
    Raises the retriever's fault when a query is not answered.
    """
    asked: dict[str, int] = defaultdict(int)
    found: dict[str, int] = defaultdict(int)
    for start in range(0, len(tasks), QUERIES_AT_ONCE):
        batch = tasks[start : start + QUERIES_AT_ONCE]
        for task, answer in zip(batch, retriever.search([task.text for task in batch], topk), strict=True):
            if isinstance(answer, EnvironmentFault):
                raise answer
            asked[task.task_type] += 1
            found[task.task_type] += holds_answer(answer, task.payload["answers"])
        advance(len(batch))
    return [Recall(name, asked[name], found[name]) for name in sorted(asked)]


def holds_answer(hits: Sequence[Hit], answers: Sequence[str]) -> bool:
    """Whether a gold answer stands in the title or text of a passage, as whole words."""
    texts = [f" {normalise(f'{hit.passage.title} {hit.passage.text}')} " for hit in hits]
    golds = [gold for gold in map(normalise, answers) if gold]
    return any(f" {gold} " in text for gold in golds for text in texts)
