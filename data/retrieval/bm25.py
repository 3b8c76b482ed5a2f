"""BM25 in this process: bm25s on the memory-mapped index.

A query is turned into words exactly as the passages were. Scores are those of bm25s; ties go to the passage that comes first
in the corpus, and a passage that shares no word with the query is no answer. Each query is scored alone, so that an answer
never depends on what else is asked. May be called from several threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data.retrieval import Answer, Hit
from data.retrieval.index.directory import IndexDirectory
from data.retrieval.index.words import query_words
from schemas.artifacts import file_errors
from schemas.errors import ArtifactError, ConfigError


class Bm25Retriever:
    """Answers queries from an index of kind bm25. Raises ConfigError for another kind, ArtifactError for damage."""

    def __init__(self, index: IndexDirectory) -> None:
        if index.kind != "bm25":
            raise ConfigError("the index is of another kind", where=str(index.path), expected="bm25", found=index.kind)
        import bm25s

        self.index = index
        self._stop_words = frozenset(index.settings["stop_words"])
        with file_errors(index.path):
            try:
                self._bm25 = bm25s.BM25.load(str(index.path), mmap=True)
            except OSError:
                raise
            except Exception as error:  # damaged headers and JSON raise errors of many kinds
                raise self._damaged(error) from error
        # Plain arrays on the mapped memory: slicing them costs a tenth of slicing np.memmap.
        self._bm25.scores = {
            name: np.asarray(value) if name != "num_docs" else value for name, value in self._bm25.scores.items()
        }
        index.map_passages()

    @property
    def settings(self) -> Mapping[str, Any]:
        """Kind and parameters, as the index has them."""
        return {name: self.index.settings[name] for name in ("kind", "k1", "b", "method")}

    def index_id(self) -> str:
        """Hash of the index."""
        return self.index.index_id

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        """The best `topk` passages of each query that share a word with it, best first.

        Raises ArtifactError where the index turns out to be damaged; else nothing fails.
        """
        return [self._search_one(query, topk) for query in queries]

    def close(self) -> None:
        """Nothing to release: the mapping ends with the last reference."""

    def _search_one(self, query: str, topk: int) -> list[Hit]:
        try:
            numbers, scores = self.best(query, topk)
        except (IndexError, ValueError) as error:  # numbers that point outside
            raise self._damaged(error) from error
        pairs = zip(numbers.tolist(), scores.tolist(), strict=True)
        return [Hit(self.index.passage(number), score) for number, score in pairs]

    def _damaged(self, error: Exception) -> ArtifactError:
        return ArtifactError(
            "the index is damaged", where=str(self.index.path), found=str(error), remedy="run `rsipo index check`"
        )

    def best(self, query: str, topk: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers (int64) and scores (float32) of the best passages, best first."""
        known = self._bm25.get_tokens_ids(query_words(query, self._stop_words))
        if not known or topk < 1:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        return best_of(self._bm25.get_scores_from_ids(known), topk)


def best_of(scores: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and scores of the highest positive scores, descending, ties by number.

    >>> best_of(np.array([0.0, 2.0, 1.0, 2.0], np.float32), 3)[0].tolist()
    [1, 3, 2]
    """
    size = len(scores)
    least = np.partition(scores, size - topk)[size - topk] if topk < size else np.float32(0)
    found = np.flatnonzero(scores >= least if least > 0 else scores > 0)
    order = np.argsort(-scores[found], kind="stable")[:topk]
    return found[order], scores[found[order]]
