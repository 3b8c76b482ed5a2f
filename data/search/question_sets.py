"""The seven question sets: where each is found, how its rows are laid out, and how many hops a question takes.

A row is a mapping as `datasets` yields it. A column is named by its path (`answer.aliases` is the field `aliases` of the
column `answer`). Every set is known in its own layout and in the one layout that the FlashRAG collection, which Search-R1
trains on, gives to all of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import ConfigError

FLASHRAG_HUB = "RUC-NLPIR/FlashRAG_datasets"
UNKNOWN_HOPS = "2+"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Layout:
    """Which columns of a row hold what.

    Every path in `answers` may hold a text or a list of texts; the first must be there, the others may be missing.
    `ids` are tried in order; a layout without any identifies a question by its hash. `json_answers`: a text that holds a
    JSON list. `hops` is a column that names the hop class.
    """

    question: str
    answers: tuple[str, ...]
    ids: tuple[str, ...] = ()
    json_answers: bool = False
    hops: str | None = None

    def fits(self, row: Row) -> bool:
        """Whether the row has the columns without which nothing can be read."""
        needed = [self.question, self.answers[0], *([self.hops] if self.hops else [])]
        has_id = not self.ids or any(has(row, path) for path in self.ids)
        return has_id and all(has(row, path) for path in needed)

    @property
    def wanted(self) -> str:
        """The columns as an error message names them."""
        ids = [" or ".join(self.ids)] if self.ids else []
        return ", ".join([*ids, self.question, *self.answers, *([self.hops] if self.hops else [])])


@dataclass(frozen=True)
class QuestionSet:
    """One data set. `splits` maps each accepted name of a split to the one the hub uses; `hub` is None for local sets."""

    name: str
    layouts: tuple[Layout, ...]
    hops: Callable[[Row], str | None]
    hub: str | None = None
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=dict)

    def layout_of(self, row: Row) -> Layout | None:
        """The first layout whose columns the row has."""
        return next((layout for layout in self.layouts if layout.fits(row)), None)


def has(row: Row, path: str) -> bool:
    """Whether a row has a column or nested field, even an empty one."""
    return path in row or _parent(row, path) is not None


def value_of(row: Row, path: str) -> Any:
    """The value of a column or nested field; None where it is missing."""
    if path in row:
        return row[path]
    parent = _parent(row, path)
    return None if parent is None else parent[path.rpartition(".")[2]]


def _parent(row: Row, path: str) -> Row | None:
    """The innermost mapping that holds the last name of a dotted path."""
    *outer, last = path.split(".")
    inner: Any = row
    for name in outer:
        inner = inner.get(name) if isinstance(inner, Mapping) else None
    return inner if isinstance(inner, Mapping) and last in inner else None


FLASHRAG = Layout("question", ("golden_answers",), ids=("id",))


def _one(row: Row) -> str:
    return "1"


def _two(row: Row) -> str:
    return "2"


def _hotpotqa_hops(row: Row) -> str:
    return "2" if _kind(row) in ("bridge", "comparison") else UNKNOWN_HOPS


def _two_wiki_hops(row: Row) -> str:
    kind = _kind(row)
    if kind == "bridge_comparison":
        return "4"
    return "2" if kind in ("compositional", "comparison", "inference") else UNKNOWN_HOPS


def _musique_hops(row: Row) -> str:
    """From the id (`3hop1__...`), or from the steps that the question was composed of."""
    own = value_of(row, "id")
    if isinstance(own, str) and own[:1] in "234" and own[1:4] == "hop":
        return own[0]
    for path in ("question_decomposition", "metadata.question_decomposition"):
        steps = value_of(row, path)
        if isinstance(steps, Sequence) and not isinstance(steps, str) and 2 <= len(steps) <= 4:
            return str(len(steps))
    return UNKNOWN_HOPS


def _kind(row: Row) -> Any:
    own = value_of(row, "type")
    return value_of(row, "metadata.type") if own is None else own


_TRAIN_AND_DEV = {"train": "train", "dev": "validation", "validation": "validation"}

SETS: Mapping[str, QuestionSet] = {
    known.name: known
    for known in (
        # NQ-open and the unfiltered TriviaQA call `validation` what open-domain work calls the test questions.
        QuestionSet(
            "nq",
            (Layout("question", ("answer",)), FLASHRAG),
            _one,
            "google-research-datasets/nq_open",
            "nq_open",
            {**_TRAIN_AND_DEV, "test": "validation"},
        ),
        QuestionSet(
            "triviaqa",
            (
                Layout(
                    "question", ("answer.value", "answer.aliases", "answer.normalized_aliases"), ids=("question_id",)
                ),
                FLASHRAG,
            ),
            _one,
            "mandarjoshi/trivia_qa",
            "unfiltered.nocontext",
            {**_TRAIN_AND_DEV, "test": "validation"},
        ),
        QuestionSet(
            "popqa",
            (Layout("question", ("possible_answers",), ids=("id",), json_answers=True), FLASHRAG),
            _one,
            "akariasai/PopQA",
            None,
            {"test": "test"},
        ),
        QuestionSet(
            "hotpotqa",
            (Layout("question", ("answer",), ids=("id", "_id")), FLASHRAG),
            _hotpotqa_hops,
            "hotpotqa/hotpot_qa",
            "distractor",
            _TRAIN_AND_DEV,
        ),
        QuestionSet(
            "2wikimultihopqa",
            (Layout("question", ("answer",), ids=("_id", "id")), FLASHRAG),
            _two_wiki_hops,
            "framolfese/2WikiMultihopQA",
            None,
            _TRAIN_AND_DEV,
        ),
        QuestionSet(
            "musique",
            (Layout("question", ("answer", "answer_aliases"), ids=("id",)), FLASHRAG),
            _musique_hops,
            "dgslibisey/MuSiQue",
            None,
            _TRAIN_AND_DEV,
        ),
        QuestionSet(
            "bamboogle",
            (Layout("Question", ("Answer",)), FLASHRAG),
            _two,
            "chiayewken/bamboogle",
            None,
            {"test": "test"},
        ),
    )
}


def flashrag_set(name: str) -> QuestionSet:
    """A known set as the FlashRAG collection has it: one repository, a configuration for each set, splits by their names."""
    known = question_set(name)
    splits = {
        "nq": ("train", "dev", "test"),
        "triviaqa": ("train", "dev", "test"),
        "popqa": ("test",),
        "bamboogle": ("test",),
    }.get(name, ("train", "dev"))
    return QuestionSet(name, (FLASHRAG,), known.hops, FLASHRAG_HUB, name, {split: split for split in splits})


def mapped_set(name: str, layout: Layout) -> QuestionSet:
    """A set of any name whose columns the user names. A known set keeps its rule for the hop class."""
    rule = SETS[name].hops if name in SETS else _no_hops
    return QuestionSet(name, (layout,), rule)


def _no_hops(row: Row) -> None:
    return None


def question_set(name: str, *, where: str = "data set") -> QuestionSet:
    """A known set by its short name. Raises ConfigError with the nearest name for any other."""
    if name in SETS:
        return SETS[name]
    near = difflib.get_close_matches(name.lower(), SETS, n=1, cutoff=0.5)
    own = "name its columns, as in sets:mine:test=FILE,question=query,answers=gold"
    raise ConfigError(
        "unknown data set",
        where=where,
        expected=f"one of {', '.join(SETS)}",
        found=repr(name),
        remedy=f"did you mean {near[0]}? For a set of your own, {own}" if near else f"for a set of your own, {own}",
    )
