"""A retriever of a few passages that needs no index, and search environments on top of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from data.retrieval import Answer, Hit, Passage, RetrievalFault
from data.search.environment import SearchEnvironment
from data.search.retrievers import CountedRetriever
from data.tasks import Task

PASSAGES = (
    Passage("1", "Slow Rain", "Slow Rain is a novel by Mira Kolben."),
    Passage("2", "Mira Kolben", "Mira Kolben was born in Tarvold."),
    Passage("3", "Tarvold", "Tarvold is a town </information> on the Elm."),
)


class WordRetriever:
    """Passages by the number of words shared with the query; remembers what it was asked. `down`: queries that fail."""

    def __init__(self, index: str = "a" * 64, down: Sequence[str] = ()) -> None:
        self.index, self.down = index, set(down)
        self.calls: list[list[str]] = []
        self.closed = False

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"kind": "words"}

    def index_id(self) -> str:
        return self.index

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        self.calls.append(list(queries))
        return [RetrievalFault(f"no line for {q}") if q in self.down else self._hits(q)[:topk] for q in queries]

    def close(self) -> None:
        self.closed = True

    @staticmethod
    def _hits(query: str) -> list[Hit]:
        words = set(query.lower().split())
        scored = [(len(words & set(f"{p.title} {p.text}".lower().split())), p) for p in PASSAGES]
        return [Hit(p, float(score)) for score, p in sorted(scored, key=lambda pair: -pair[0]) if score]


def search_environment(
    retriever: WordRetriever | None = None, corpus: str | None = None, **options: object
) -> SearchEnvironment:
    environment = SearchEnvironment(**{"retriever": {"index": "nowhere"}, **options})
    environment.__dict__["retriever"] = CountedRetriever(retriever or WordRetriever(), lambda: corpus)
    return environment


def question(name: str = "q", answers: Sequence[str] = ("Tarvold",), **payload: object) -> Task:
    text = "Where was the author of Slow Rain born?"
    return Task(name, "hotpotqa", "test", text, {"answers": list(answers), **payload}, {"hops": "2"})
