"""Retrieval: passages, indexes on disk, and the one protocol behind which every retriever stands.

An index is an artefact with a content hash; a retriever answers queries from an index in this process (`bm25`, `dense`) or
from a server (`http`). Whatever its kind, equal query, index and settings give equal passages in equal order, whoever else
asks at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from schemas.errors import EnvironmentFault


@dataclass(frozen=True)
class Passage:
    """One unit of the corpus. `passage_id` is unique in its corpus; `title` may be empty, `text` is not."""

    passage_id: str
    title: str
    text: str


@dataclass(frozen=True)
class Hit:
    """A passage that answers a query; a higher score is a better match."""

    passage: Passage
    score: float


class RetrievalFault(EnvironmentFault):
    """A query that could not be answered: server down, too slow, or answering something else."""


Answer = list[Hit] | RetrievalFault


class Retriever(Protocol):
    """Answers queries with passages."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What decides the answers besides the index and is known without touching it: kind, parameters. JSON values."""

    def index_id(self) -> str:
        """Hash (or, for a server that tells none, the configured name) of the index.

        May have to ask a server: raises RetrievalFault when that does not answer.
        """

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        """The best `topk` passages of each query, best first, ties by position in the corpus; fewer where fewer match.

        One answer per query, in order. A query that could not be answered has a fault in its place; nothing is raised.
        """

    def close(self) -> None: ...
