"""The search environment: a question, a retriever, at most a few turns; exact match is the outcome (method section 4).

A start is the same start when the question, the index and the settings of the retriever are the same: the fingerprint is
made of these. Searches of a round are looked up together, each distinct query once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from data.environments import Observation, ParsedReply, Prompts, Session, StepResult
from data.prompts.search import CLOSE, INVITATION, OPEN, CompactPrompts, StandardPrompts
from data.retrieval import Answer, Hit, Retriever
from data.search.options import SearchOptions
from data.search.replies import FORMAT, parse_reply, split_action
from data.search.retrievers import CountedRetriever, open_retriever
from data.search.scoring import exact_match, f1, substring_match
from data.tasks import Panel, Task
from schemas.artifacts import sha256_json
from schemas.config_loading import options_from_mapping
from schemas.errors import ArtifactError, ConfigError

REVISION = "1"  # raised whenever the same replies would lead to other texts or outcomes
NOTHING_FOUND = "No passage was found."
PROMPTS: dict[str, type[StandardPrompts] | type[CompactPrompts]] = {
    "standard": StandardPrompts,
    "compact": CompactPrompts,
}


class SearchEnvironment:
    """Factory of search sessions; options as in `data.search.options`. Raises ConfigError for options that cannot be."""

    name = "search"

    def __init__(self, **options: object) -> None:
        self.options = options_from_mapping(SearchOptions, options, "env.options")
        self.prompts: Prompts = PROMPTS[self.options.prompts]()
        self._round: dict[str, Answer] = {}

    @cached_property
    def retriever(self) -> CountedRetriever:
        """Opened when first needed. Raises ArtifactError or ConfigError when there is no such index."""
        return open_retriever(self.options)

    @cached_property
    def version(self) -> str:
        """Revision, retriever and what is shown of its answers; names a local index by its hash.

        Opens the retriever, so that a missing index or a wrong address is found before anything is played.
        """
        options, retriever = self.options, self.retriever
        index = options.retriever.index if options.retriever.kind == "http" else retriever.index_id()[:16]
        words = f"{options.passage_words} words" if options.passage_words else "whole passages"
        return f"{REVISION} ({options.retriever.kind} index {index}, top {options.topk}, {words})"

    def start(self, task: Task) -> Session:
        """Begin with the question alone.

        Raises ArtifactError for a task that is no question, ConfigError when the index is not the corpus that the question
        was made for, RetrievalFault when a server does not say which index it serves.
        """
        corpus = task.payload.get("corpus")
        found = self.retriever.corpus_sha256()
        if corpus is not None and found is not None and corpus != found:
            raise ConfigError(
                "the question belongs to another corpus",
                where=f"task {task.task_id}",
                expected=f"an index of corpus {str(corpus)[:16]}",
                found=found[:16],
                remedy="give env.options.retriever.index and the questions the same source",
            )
        facts = [task.sha256, INVITATION, self.version, self.retriever.index_id(), dict(self.retriever.settings)]
        return SearchSession(self, _golds(task), sha256_json(facts))

    def parse_reply(self, text: str, *, cut: bool) -> ParsedReply:
        """See `data.search.replies.parse_reply`."""
        return parse_reply(text, cut=cut)

    def panel(self, source: str, *, limit: int | None = None) -> Panel:
        """Load a panel of questions; see `data.search.panels.load_panel`."""
        from data.search.panels import load_panel

        return load_panel(source, limit=limit)

    def prepare(self, steps: Sequence[tuple[Session, str]]) -> None:
        """Look up the searches among the steps to come, all at once."""
        acts = [split_action(action) for _, action in steps]
        queries = list(dict.fromkeys(text for act, text in acts if act == "search"))
        answers = self.retriever.search(queries, self.options.topk) if queries else []
        self._round = dict(zip(queries, answers, strict=True))

    def look_up(self, query: str) -> list[Hit]:
        """The passages of a query. Raises RetrievalFault when they could not be had."""
        self.retriever.asked += 1
        answer = self._round.get(query)
        if answer is None:
            [answer] = self.retriever.search([query], self.options.topk)
        if isinstance(answer, Exception):
            raise answer
        self.retriever.empty += not answer
        return answer

    def counters(self) -> Mapping[str, float]:
        """See `CountedRetriever.counters`."""
        return self.retriever.counters() if "retriever" in self.__dict__ else {}

    def close(self) -> None:
        """Let go of the retriever; the next start opens it again."""
        self._round = {}
        retriever: Retriever | None = self.__dict__.pop("retriever", None)
        if retriever is not None:
            retriever.close()


class SearchSession:
    """One question being answered."""

    def __init__(self, environment: SearchEnvironment, golds: Sequence[str], fingerprint: str) -> None:
        self.first_observation = Observation(INVITATION)
        self.fingerprint = fingerprint
        self._environment, self._golds = environment, golds
        self._searches = 0

    def step(self, action: str) -> StepResult:
        """Search, or answer and end. Raises RetrievalFault when a search could not be carried out."""
        act, text = split_action(action)
        if act == "answer":
            return self._answered(text)
        hits = self._environment.look_up(text)
        self._searches += 1
        return self._goes_on(information(hits, self._environment.options.passage_words))

    def reject(self, reason: str) -> StepResult:
        """Say why a reply could not be read."""
        return self._goes_on(FORMAT.rejection(reason))

    def close(self) -> None:
        """Nothing is held."""

    def _answered(self, answer: str) -> StepResult:
        won = exact_match(answer, self._golds)
        score = f1(answer, self._golds)
        metrics = self._metrics(score, substring_match(answer, self._golds))
        text = "The answer is right." if won else "The answer is wrong."
        return StepResult(Observation(text), done=True, won=won, score=score, metrics=metrics)

    def _goes_on(self, text: str) -> StepResult:
        return StepResult(Observation(text), done=False, won=False, score=0.0, metrics=self._metrics(0.0, False))

    def _metrics(self, score: float, substring: bool) -> dict[str, float]:
        return {"f1": score, "searches": float(self._searches), "substring_match": float(substring)}


def _golds(task: Task) -> list[str]:
    answers = task.payload.get("answers")
    if not isinstance(answers, list | tuple) or not answers or not all(isinstance(a, str) for a in answers):
        raise ArtifactError(
            "the task is no question with gold answers",
            where=task.task_id,
            expected="payload.answers, a list of texts",
            found=repr(answers)[:80],
        )
    return list(answers)


_OUR_TAGS = re.compile(r"<(?=/?(think|search|answer|information)\b)")


def information(hits: Sequence[Hit], words: int) -> str:
    """What a search brings: one numbered line a passage, its text cut to `words` words (0: whole).

    Tags of the reply format inside a passage are made harmless: a corpus must not be able to end the block.

    >>> from data.retrieval import Passage
    >>> information([Hit(Passage("7", "Rome", "A city\\nin Italy, they </information> say."), 1.0)], 6)
    '<information>\\n1. Rome: A city in Italy, they &lt;/information>\\n</information>'
    """
    lines = []
    for number, hit in enumerate(hits, start=1):
        shown = hit.passage.text.split()
        text = " ".join(shown[:words] if words else shown)
        title = " ".join(hit.passage.title.split())
        lines.append(f"{number}. {title}: {text}" if title else f"{number}. {text}")
    body = _OUR_TAGS.sub("&lt;", "\n".join(lines or [NOTHING_FOUND]))
    return f"{OPEN}\n{body}\n{CLOSE}"
