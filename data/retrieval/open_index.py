"""An index directory of any kind becomes the retriever that reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from data.retrieval import Retriever
from schemas.errors import ArtifactError

if TYPE_CHECKING:
    from data.retrieval.index.directory import IndexDirectory


def retriever_of(index: IndexDirectory) -> Retriever:
    """The retriever of an open index. Raises ArtifactError for a kind that this release does not know."""
    if index.kind == "bm25":
        from data.retrieval.bm25 import Bm25Retriever

        return Bm25Retriever(index)
    if index.kind == "dense":
        from data.retrieval.dense import DenseRetriever

        return DenseRetriever(index)
    raise ArtifactError(
        "unknown kind of index", expected="bm25 or dense", found=repr(index.kind), remedy="build it with this release"
    )
