"""A generated encyclopaedia: short linked articles about invented people, places, works and events, and questions about it.

Everything follows from (seed, articles). An entity belongs to the split `train` or `test` and its article names entities of
its own split only; so subjects, bridges and answers of test questions occur in no train question. The corpus holds both.
Nothing outside of the corpus can answer a question: names are drawn anew for every seed.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from data.retrieval import Passage
from data.search.articles import article_text
from data.search.names import EVENT, KINDS, PERSON, PLACE, WORK, titles
from data.search.relations import DATA_SETS, HOPS, Chain, chains, question_text, relations_of
from data.seeds import derive_seed
from data.tasks import Task
from schemas.errors import ConfigError

SPLITS = ("train", "test")
TEST_SHARE = 0.3
SHARES = {PERSON: 0.4, PLACE: 0.15, WORK: 0.25, EVENT: 0.2}
MIN_ARTICLES = 100  # with fewer, a split has too few people and places to be told apart
MAX_ARTICLES = int(min(len(titles(kind)) / share for kind, share in SHARES.items()))


@dataclass(frozen=True)
class Entity:
    """What one article is about. `facts` maps anchors to the names of other entities of the same split."""

    name: str
    kind: str
    split: str
    facts: Mapping[str, str]


@dataclass(frozen=True)
class Question:
    """A question with its way through the corpus: `entities` are the subject, any bridge, and the answer."""

    data_set: str
    split: str
    text: str
    chain: Chain
    entities: tuple[str, ...]

    @property
    def subject(self) -> str:
        return self.entities[0]

    @property
    def answer(self) -> str:
        return self.entities[-1]


@dataclass(frozen=True)
class World:
    """The encyclopaedia of one (seed, articles)."""

    seed: int
    articles: int
    entities: Mapping[str, Entity]  # by title, in the order of the articles
    passages: tuple[Passage, ...]

    @cached_property
    def corpus_sha256(self) -> str:
        """Hash of the passages; equals that of an index built from them."""
        from data.retrieval.index.passages import corpus_sha256

        return corpus_sha256(self.passages)

    def candidates(self, data_set: str, split: str) -> Iterator[Question]:
        """Every question of a data set whose answer takes all its hops, in a fixed shuffled order; one for each subject."""
        rng = random.Random(derive_seed(self.seed, "questions", self.articles, data_set, split))
        ways = chains(data_set)
        subjects = [
            entity for entity in self.entities.values() if entity.kind == ways[0][0].subject and entity.split == split
        ]
        rng.shuffle(subjects)
        for number, entity in enumerate(subjects):
            chain, wording = ways[number % len(ways)], rng.randrange(2)
            names = self.follow(entity.name, [relation.anchor for relation in chain])
            # An answer that an earlier article of the way names, too, could be had with fewer hops.
            named = {entity.name, *(value for name in names[:-2] for value in self.entities[name].facts.values())}
            if names[-1] not in named:
                yield Question(data_set, split, question_text(chain, entity.name, wording), chain, tuple(names))

    def follow(self, name: str, anchors: Sequence[str]) -> list[str]:
        """`name` and what its anchors lead to, one after the other."""
        names = [name]
        for anchor in anchors:
            names.append(self.entities[names[-1]].facts[anchor])
        return names

    def questions(self, split: str, hops: Sequence[int] = (1, 2), count: int = 100, seed: int = 0) -> list[Task]:
        """`count` questions as tasks, the data sets with these hops in turn; another `seed` takes other questions.

        Raises ConfigError when a split or hop class does not exist or the world is too small for `count`.
        """
        if split not in SPLITS:
            raise ConfigError("unknown split", where="split", expected=" or ".join(SPLITS), found=repr(split))
        data_sets = [name for name in DATA_SETS if HOPS[name] in hops]
        if not data_sets or not set(hops) <= set(HOPS.values()):
            raise ConfigError("unknown number of hops", where="hops", expected="1, 2 or 1+2", found=tuple(hops))
        if count < 1:
            raise ConfigError("a panel needs a question", where="count", expected=">= 1", found=count)
        drawn: list[list[Question]] = []
        for position, name in enumerate(data_sets):
            wanted = count // len(data_sets) + (position < count % len(data_sets))
            found = list(self.candidates(name, split))
            random.Random(derive_seed(self.seed, "panel", seed, name, split)).shuffle(found)
            if len(found) < wanted:
                raise ConfigError(
                    "the encyclopaedia is too small for so many questions", where=f"{name}, {split}",
                    expected=f"count <= {len(found) * len(data_sets)}", found=count, remedy="raise articles",
                )  # fmt: skip
            drawn.append(found[:wanted])
        return [self._task(question) for group in drawn for question in group]

    def _task(self, question: Question) -> Task:
        way = [relation.anchor for relation in question.chain]
        return Task(
            task_id="-".join(
                [question.data_set, str(self.seed), str(self.articles), *map(_slug, (question.subject, *way))]
            ),
            task_type=question.data_set,
            split=question.split,
            text=question.text,
            payload={"answers": [question.answer], "corpus": self.corpus_sha256},
            labels={"hops": str(HOPS[question.data_set])},
        )


@lru_cache(maxsize=4)
def generate_world(seed: int, articles: int) -> World:
    """The encyclopaedia of a seed with `articles` articles. Raises ConfigError when the number is out of range."""
    if not MIN_ARTICLES <= articles <= MAX_ARTICLES:
        raise ConfigError(
            "the encyclopaedia cannot have so many articles", where="articles",
            expected=f"{MIN_ARTICLES} to {MAX_ARTICLES}", found=articles,
        )  # fmt: skip
    rng = random.Random(derive_seed(seed, "encyclopaedia", articles))
    names = {kind: rng.sample(titles(kind), round(articles * SHARES[kind])) for kind in KINDS[1:]}
    names[PERSON] = rng.sample(titles(PERSON), articles - sum(map(len, names.values())))
    members: dict[tuple[str, str], list[str]] = defaultdict(list)
    for kind in KINDS:
        tests = round(len(names[kind]) * TEST_SHARE)
        members[kind, "test"], members[kind, "train"] = names[kind][:tests], names[kind][tests:]
    found = [
        Entity(name, kind, split, _draw_facts(name, kind, split, members, rng))
        for kind in KINDS
        for split in SPLITS
        for name in members[kind, split]
    ]
    rng.shuffle(found)
    passages = tuple(
        Passage(f"{number:05d}", entity.name, article_text(entity.name, entity.kind, entity.facts, rng))
        for number, entity in enumerate(found)
    )
    return World(seed, articles, {entity.name: entity for entity in found}, passages)


def _draw_facts(
    name: str, kind: str, split: str, members: Mapping[tuple[str, str], list[str]], rng: random.Random
) -> dict[str, str]:
    """A value for each relation of the kind; no article names an entity twice or itself."""
    facts: dict[str, str] = {}
    for relation in relations_of(kind):
        value = name
        while value == name or value in facts.values():
            value = rng.choice(members[relation.value, split])
        facts[relation.anchor] = value
    return facts


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
