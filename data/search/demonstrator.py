"""A scripted searcher that reads passages only and follows a given plan, right or wrong.

A plan is a number of searches before the answer. The first looks up what the question names, each further one what the
last one found; the answer is what was found last. With as many searches as the question has hops the answer is right; with
fewer it is the bridge, with more it is something beyond. *How* it reads is always sound; *what* it plans is a separate
choice, so that a model trained on its episodes profits from a good skill and is harmed by a bad one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from data.search.encyclopaedia import Question
from data.search.names import PERSON
from data.search.relations import BY_ANCHOR, HOPS

MAX_SEARCHES = 3
ANSWER = "answer"
ONWARD = {True: "born in", False: "founded by"}  # what is looked up beyond the question's end: of a person, of a place

_NAME = r"((?:The )?[A-Z][a-z]+(?: [A-Z][a-z]+)*)"


def good_plan(data_set: str) -> int:
    """The number of searches that leads to the answer."""
    return HOPS[data_set]


def bad_plans(data_set: str) -> list[int]:
    """Numbers of searches that do not.

    >>> bad_plans("gen-works")
    [0, 1, 3]
    """
    return [searches for searches in range(MAX_SEARCHES + 1) if searches != HOPS[data_set]]


def plan_steps(question: Question, searches: int) -> tuple[str, ...]:
    """What a plan looks up, one anchor for each search, and the answer."""
    anchors = [relation.anchor for relation in question.chain][:searches]
    while len(anchors) < searches:
        anchors.append(ONWARD[BY_ANCHOR[anchors[-1]].value == PERSON])
    return (*anchors, ANSWER)


@dataclass
class Searcher:
    """Plays one episode. `reply` is given the text of the passages that the last search found, and nothing else."""

    question: Question
    searches: int
    found: list[str] = field(default_factory=list)  # the subject, then what each search found
    _started: bool = False

    def __post_init__(self) -> None:
        self.steps = plan_steps(self.question, self.searches)
        self.found.append(self.question.subject)

    @property
    def wanted(self) -> str:
        """The name to look up next, or to answer with."""
        return self.found[-1]

    def reply(self, passages: Sequence[tuple[str, str]]) -> tuple[str, str, str]:
        """(thought, act, its text) after `passages`, (title, text) pairs. A plan without a search guesses the subject."""
        if not self._started:
            self._started = True
            thought = "plan: " + ", ".join(self.steps)
        else:
            thought = f" {self._read(passages)}; {self._step}"
        return thought, ANSWER if self._step == ANSWER else "search", self.wanted

    @property
    def _step(self) -> str:
        return self.steps[len(self.found) - 1]

    def _read(self, passages: Sequence[tuple[str, str]]) -> str:
        """What the passages say about the wanted name; a find moves the plan on."""
        told = reading(self.wanted, self._step, passages)
        if told is None:
            return f"{self.wanted} not found"
        said = f"{self.wanted} {self._step} {told}"
        self.found.append(told)
        return said


def reading(name: str, anchor: str, passages: Sequence[tuple[str, str]]) -> str | None:
    """The value that the article of `name` states after `anchor`, or None when it is not among `passages`.

    >>> reading("Mira Kolbsen", "born in", [("Mira Kolbsen", "She died in Ashwick and was born in Old Norton.")])
    'Old Norton'
    """
    for title, text in passages:
        if title == name and (found := re.search(rf"\b{anchor} {_NAME}", text)):
            return found.group(1)
    return None
