"""The recipe of a dense index: the vector of each passage, float32, in `vectors.npy`.

Passages are embedded in this process, in groups that depend on the corpus alone, so that the vectors do not depend on how
the corpus is spread over files or where a build was interrupted. (Another processor may give other last bits.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data.retrieval.index.embedding import Embedder, Pooling, load_embedder, model_directory, model_sha256
from data.retrieval.index.passages import regrouped
from data.retrieval.index.postings import ArrayFile
from data.retrieval.index.shards import Shard, passage_arrays
from data.retrieval.index.sources import Block, Columns
from schemas.artifacts import file_errors
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from data.retrieval.index.corpus import Corpus

VECTORS = "vectors.npy"
SHARD_PASSAGES = 2048


@dataclass(frozen=True)
class DenseRecipe:
    """How passages and queries become vectors. `model` is a directory or a hub name.

    Raises ConfigError for a setting out of range and for a model that is not there.
    """

    model: str = ""
    pooling: Pooling = "mean"
    query_prefix: str = ""
    passage_prefix: str = ""
    max_length: int = 256
    normalise: bool = True

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("a dense index needs an embedding model", where="model", remedy="pass --model")
        if self.pooling not in ("mean", "cls"):
            raise ConfigError("unknown pooling", where="pooling", expected="mean or cls", found=self.pooling)
        if self.max_length < 2:
            raise ConfigError("too few tokens", where="max_length", expected="2 or more", found=self.max_length)

    @functools.cached_property
    def directory(self) -> Path:
        """Where the model lies."""
        return model_directory(self.model)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        return {
            "kind": "dense",
            "model_sha256": model_sha256(self.directory),
            "pooling": self.pooling,
            "query_prefix": self.query_prefix,
            "passage_prefix": self.passage_prefix,
            "max_length": self.max_length,
            "normalise": self.normalise,
        }

    @property
    def sources(self) -> dict[str, str]:
        path = Path(self.model).expanduser()
        return {"model": str(path.resolve()) if path.is_dir() else self.model}

    @property
    def embedder(self) -> Embedder:
        """The model in memory."""
        return load_embedder(self.directory, self.pooling, self.max_length, self.normalise)

    def staged_by(self) -> str:
        return repr(sorted((name, value) for name, value in self.settings.items() if name != "query_prefix"))

    def blocks(self, corpus: Corpus) -> tuple[Iterator[Block], Columns]:
        return regrouped(corpus.blocks(), corpus.columns, SHARD_PASSAGES), Columns("id", "title", "text")

    def arrays(self, block: Block, columns: Columns) -> dict[str, np.ndarray]:
        arrays, texts = passage_arrays(block, columns)
        vectors = self.embedder.many([self.passage_prefix + text for text in texts])
        return arrays | {"vectors": vectors.reshape(-1)}

    def merge(self, shards: Sequence[Shard], target: Path, advance: Callable[[int], None]) -> dict[str, Any]:
        dimensions = self.embedder.dimensions
        count = sum(shard.length("vectors") for shard in shards) // dimensions
        with file_errors(target), ArrayFile(target / VECTORS, "<f4", (count, dimensions)) as vectors:
            for shard in shards:
                vectors.append(shard.array("vectors"))
                advance(shard.length("vectors") // dimensions)
        return {"dimensions": dimensions}

    def workers(self, wanted: int) -> int:
        return 1  # torch uses all processors by itself


DENSE_SETTINGS = tuple(field.name for field in fields(DenseRecipe))
