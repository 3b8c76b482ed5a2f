"""The training text of the bundled search policy: episodes of the scripted searcher in generated encyclopaedias.

Example `index` of a corpus follows from (seed, index) alone; every `EXAMPLES_PER_WORLD` examples another encyclopaedia is
searched, so that no name can be learned by heart. Five kinds of example are mixed: episodes without a skill, whose plan is
right in `GOOD_SHARE` of them only; episodes with a skill, whose plan is whatever the skill says; episodes with a skill that
says nothing, played like those without; (finished episode -> skill) pairs, good and poor ones mixed; and drills, short
questions about what passages say, since reading is what a small model learns last. Searches that lead nowhere are put in
(without loss), so that recovery is shown too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import bm25s
import numpy as np

from data.environments import Observation, Turn
from data.policies.conversations import Conversation, Message
from data.prompts.search import INVITATION, CompactPrompts
from data.retrieval import Hit, Passage
from data.retrieval.index.passages import indexed_text
from data.search.demonstrator import Searcher, bad_plans, good_plan, reading
from data.search.encyclopaedia import SPLITS, Question, World, generate_world
from data.search.environment import information
from data.search.names import KINDS
from data.search.relations import DATA_SETS, relations_of
from data.search.skill_texts import skill_reply, skill_text, vague_skill
from data.seeds import derive_seed
from data.tasks import Task

GOOD_SHARE = 0.4  # right plans among episodes without a skill: what the student starts from
EXAMPLES_PER_WORLD = 1536
WORLD_ARTICLES = 3000
MAX_TURNS = 4
TOPK = 3
PASSAGE_WORDS = 100
SKILL_PAIR_SHARE = 0.2
WRONG_SEARCH_SHARE = 0.15  # episodes with a search put in that leads nowhere
DRILL_SHARE = 0.25
DRILL_QUESTIONS = 8


@dataclass(frozen=True)
class Library:
    """An encyclopaedia with its search engine, the one that the environment has (see `data.retrieval.bm25`)."""

    world: World

    @cached_property
    def _index(self) -> bm25s.BM25:
        index = bm25s.BM25(method="lucene")
        texts = [indexed_text(passage) for passage in self.world.passages]
        index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
        return index

    def search(self, query: str) -> list[Passage]:
        """The best passages, best first, of equals the earlier; none when no word of the query occurs."""
        [words] = bm25s.tokenize([query], return_ids=False, show_progress=False)
        if not words:
            return []
        scores = self._index.get_scores(words)
        best = np.argsort(-scores, kind="stable")[:TOPK]
        return [self.world.passages[row] for row in best if scores[row] > 0]

    @cached_property
    def questions(self) -> dict[str, list[Question]]:
        """All questions by data set."""
        return {
            name: [question for split in SPLITS for question in self.world.candidates(name, split)]
            for name in DATA_SETS
        }

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """All titles by kind."""
        return {kind: [e.name for e in self.world.entities.values() if e.kind == kind] for kind in KINDS}


@lru_cache(maxsize=2)
def library(seed: int, number: int) -> Library:
    """The encyclopaedia number `number` of a corpus. Its seed is far above those that a panel would be given."""
    return Library(generate_world(2**40 + derive_seed(seed, "world", number) % 2**40, WORLD_ARTICLES))


def example(seed: int, index: int) -> Conversation:
    """The conversation number `index`."""
    rng = random.Random(derive_seed(seed, "search corpus", index))
    books = library(seed, index // EXAMPLES_PER_WORLD)
    question = rng.choice(books.questions[DATA_SETS[index % len(DATA_SETS)]])
    draw = rng.random()
    if draw < SKILL_PAIR_SHARE:
        return _skill_pair(question, books, rng)
    if rng.random() < DRILL_SHARE:
        return _drill(books, rng)
    skill, searches = _skill_and_plan(question.data_set, rng, with_skill=draw > 0.6)
    return _episode(question, searches, skill, books, rng)[0]


def _skill_and_plan(data_set: str, rng: random.Random, *, with_skill: bool) -> tuple[str | None, int]:
    if not with_skill:
        return None, unaided_plan(data_set, rng)
    draw = rng.random()
    if draw < 0.15:
        return vague_skill(rng), unaided_plan(data_set, rng)
    searches = good_plan(data_set) if draw < 0.55 else rng.choice(bad_plans(data_set))
    return skill_text(searches, rng), searches


def unaided_plan(data_set: str, rng: random.Random) -> int:
    """The plan of an episode without a useful skill: right in `GOOD_SHARE` of the draws."""
    return good_plan(data_set) if rng.random() < GOOD_SHARE else rng.choice(bad_plans(data_set))


def _episode(
    question: Question, searches: int, skill: str | None, books: Library, rng: random.Random
) -> tuple[Conversation, list[Turn], bool]:
    prompts, player, task = CompactPrompts(), Searcher(question, searches), _task(question)
    observation = Observation(INVITATION)
    conversation = [Message("user", prompts.opening(task, observation, skill), False)]
    turns: list[Turn] = []
    passages: list[Passage] = []
    wrong_turn = rng.randrange(searches) if 0 < searches < 3 and rng.random() < WRONG_SEARCH_SHARE else None
    while True:
        thought, act, text = player.reply([(passage.title, passage.text) for passage in passages])
        led_astray = len(turns) == wrong_turn
        if led_astray:
            text = _wrong_query(text, books, rng)
        reply = f"<think>{thought}</think><{act}> {text}</{act}>"
        turns.append(Turn(observation.text, reply, f"{act}: {text}"))
        conversation.append(Message("assistant", reply, not led_astray))
        if act == "answer" or len(turns) == MAX_TURNS:
            return conversation, turns, act == "answer" and text == question.answer
        passages = books.search(text)
        observation = Observation(information([Hit(passage, 0.0) for passage in passages], PASSAGE_WORDS))
        conversation.append(Message("user", prompts.follow_up(observation), False))


def _wrong_query(name: str, books: Library, rng: random.Random) -> str:
    """A search for half of a name, for another name, or for words that do not occur."""
    draw = rng.random()
    if draw < 0.4:
        return rng.choice(name.removeprefix("The ").split(" "))
    return rng.choice(books.names[rng.choice(KINDS)]) if draw < 0.7 else "what who where"


def _task(question: Question) -> Task:
    return Task("corpus", question.data_set, question.split, question.text, {})


def _skill_pair(question: Question, books: Library, rng: random.Random) -> Conversation:
    good, bad = good_plan(question.data_set), bad_plans(question.data_set)
    searches = good if rng.random() < 0.5 else rng.choice(bad)
    _, turns, won = _episode(question, searches, None, books, rng)
    draw = rng.random()
    described: int | None = good
    if draw > 0.8:
        described = None
    elif not won and draw > 0.5:
        described = rng.choice(bad)
    skill = vague_skill(rng) if described is None else skill_text(described, rng)
    request = CompactPrompts().skill_request(_task(question), turns, Observation(""), won)
    return [Message("user", request, False), Message("assistant", skill_reply(skill, described), True)]


def _drill(books: Library, rng: random.Random) -> Conversation:
    """What a search found, and questions about it, each answered as the thought of an episode would put it."""
    passages = books.search(rng.choice(books.names[rng.choice(KINDS)]))
    rng.shuffle(passages)
    pairs = [(passage.title, passage.text) for passage in passages]
    text = information([Hit(passage, 0.0) for passage in passages], PASSAGE_WORDS)
    lines = [CompactPrompts().follow_up(Observation(text))]
    conversation: Conversation = []
    for name, anchor in _drill_questions(passages, books, rng):
        told = reading(name, anchor, pairs)
        said = f"{name} not found" if told is None else f"{name} {anchor} {told}"
        lines.append(f"{anchor}: {name}?")
        conversation += [
            Message("user", "\n".join(lines), False),
            Message("assistant", f"<think> {said}</think>", True),
        ]
        lines = []
    return conversation


def _drill_questions(passages: Sequence[Passage], books: Library, rng: random.Random) -> list[tuple[str, str]]:
    """(name, anchor) pairs: mostly of the articles at hand, now and then of one that is not there."""
    asked = []
    for _ in range(DRILL_QUESTIONS):
        elsewhere = rng.random() < 0.15
        name = rng.choice(books.names[rng.choice(KINDS)]) if elsewhere else rng.choice(passages).title
        asked.append((name, rng.choice(relations_of(books.world.entities[name].kind)).anchor))
    return asked
