"""Dense retrieval in this process: an embedding model for the queries, exact inner products over the mapped vectors.

The vectors stay on disk, memory-mapped; faiss compares a query with all of them. Each query is embedded alone, so that an
answer never depends on what else is asked; ties go to the passage that comes first in the corpus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data.retrieval import Answer, Hit
from data.retrieval.http.wire import clean
from data.retrieval.index.dense_build import VECTORS
from data.retrieval.index.directory import IndexDirectory
from data.retrieval.index.embedding import load_embedder, model_directory, model_sha256
from schemas.errors import ArtifactError, ConfigError

_SPARE = 16  # fetched beside those wanted, to see whether the last of them is tied


class DenseRetriever:
    """Answers queries from an index of kind dense.

    `model` is where the embedding model is now, if not where it was when the index was built. Raises ConfigError when faiss
    is not installed, the index is of another kind, or there is no model; ArtifactError when the model is another one.
    """

    def __init__(self, index: IndexDirectory, model: str | None = None) -> None:
        if index.kind != "dense":
            raise ConfigError("the index is of another kind", where=str(index.path), expected="dense", found=index.kind)
        try:
            import faiss
        except ImportError as error:
            raise ConfigError(
                "dense retrieval needs faiss, which is not installed", remedy="pip install 'rsipo[dense]'"
            ) from error
        self.index = index
        self._faiss = faiss
        settings = index.settings
        directory = model_directory(model or index.sources["model"])
        if (found := model_sha256(directory)) != settings["model_sha256"]:
            raise ArtifactError(
                "the index was built with another embedding model",
                where=str(directory),
                expected=f"sha256 {settings['model_sha256'][:12]}",
                found=f"sha256 {found[:12]}",
                remedy="name the model that built it, or build the index again",
            )
        self._embedder = load_embedder(directory, settings["pooling"], settings["max_length"], settings["normalise"])
        self._prefix = str(settings["query_prefix"])
        self._vectors = index.array(VECTORS)
        if self._vectors.shape != (index.passages, self._embedder.dimensions):
            raise ArtifactError(
                "the index is damaged",
                where=str(index.path / VECTORS),
                expected=f"shape {(index.passages, self._embedder.dimensions)}",
                found=f"shape {self._vectors.shape}",
                remedy="build it again with `rsipo index build --force`",
            )
        index.map_passages()

    @property
    def settings(self) -> Mapping[str, Any]:
        """Kind, model and parameters, as the index has them."""
        return self.index.settings

    def index_id(self) -> str:
        """Hash of the index."""
        return self.index.index_id

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        """The `topk` passages nearest to each query, best first; none for an empty query. Nothing fails."""
        return [self._search_one(query, topk) for query in queries]

    def close(self) -> None:
        """Nothing to release: the mapping ends with the last reference."""

    def _search_one(self, query: str, topk: int) -> list[Hit]:
        if topk < 1 or not query.strip():
            return []
        numbers, scores = self.best(self._embedder.one(self._prefix + clean(query)), topk)
        pairs = zip(numbers.tolist(), scores.tolist(), strict=True)
        return [Hit(self.index.passage(number), score) for number, score in pairs]

    def best(self, vector: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers (int64) and inner products (float32) of the nearest passages, best first."""
        size = len(self._vectors)
        topk = min(topk, size)
        fetched = min(size, topk + _SPARE)
        metric = self._faiss.METRIC_INNER_PRODUCT
        while True:
            found = self._faiss.knn(vector[None], self._vectors, fetched, metric=metric)
            scores, numbers = found[0][0], found[1][0]
            if fetched == size or scores[fetched - 1] < scores[topk - 1]:
                break
            fetched = min(size, 4 * fetched)
        order = np.lexsort((numbers, -scores))[:topk]
        return numbers[order], scores[order]
