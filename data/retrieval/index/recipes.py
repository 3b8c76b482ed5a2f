"""What an index of each kind is made of: its settings, what a shard holds, how shards become the index."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data.retrieval.index.corpus import Corpus
from data.retrieval.index.postings import merge_postings
from data.retrieval.index.shards import Shard, passage_arrays, word_arrays
from data.retrieval.index.sources import Block, Columns
from data.retrieval.index.words import TOKEN_PATTERN
from schemas.artifacts import sha256_json
from schemas.errors import ConfigError


class Recipe(Protocol):
    """What an index of one kind is made of."""

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides the answers besides the passages, JSON values."""

    def staged_by(self) -> str:
        """Hashable text of those settings that decide what a shard holds."""

    @property
    def sources(self) -> dict[str, str]:
        """What was used by name, for people and for finding it again: never part of the identity."""

    def blocks(self, corpus: Corpus) -> tuple[Iterator[Block], Columns]:
        """The blocks that become shards, and the columns of their records."""

    def arrays(self, block: Block, columns: Columns) -> dict[str, np.ndarray]:
        """The shard of one block."""

    def merge(self, shards: Sequence[Shard], target: Path, advance: Callable[[int], None]) -> dict[str, Any]:
        """Write the files of the index; returns figures for people."""

    def workers(self, wanted: int) -> int:
        """How many processes may stage blocks."""


@dataclass(frozen=True)
class Bm25Recipe:
    """BM25 with the words of bm25s and its method `lucene`. Raises ConfigError for a parameter out of range."""

    k1: float = 1.5
    b: float = 0.75

    def __post_init__(self) -> None:
        for name, value, most in (("k1", self.k1, math.inf), ("b", self.b, 1.0)):
            if not (0 <= value <= most and math.isfinite(value)):
                expected = "0 or more" if most == math.inf else "0 to 1"
                raise ConfigError("a parameter of BM25 is out of range", where=name, expected=expected, found=value)

    @functools.cached_property
    def stop_words(self) -> tuple[str, ...]:
        from bm25s.stopwords import STOPWORDS_EN

        return tuple(STOPWORDS_EN)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "kind": "bm25",
            "k1": float(self.k1),
            "b": float(self.b),
            "method": "lucene",
            "lowercase": True,
            "token_pattern": TOKEN_PATTERN,
            "stop_words": list(self.stop_words),
            "stemmer": None,
        }

    def staged_by(self) -> str:
        return sha256_json(["bm25", TOKEN_PATTERN, self.stop_words])

    @property
    def sources(self) -> dict[str, str]:
        return {}

    def blocks(self, corpus: Corpus) -> tuple[Iterator[Block], Columns]:
        return corpus.blocks(), corpus.columns

    def arrays(self, block: Block, columns: Columns) -> dict[str, np.ndarray]:
        arrays, texts = passage_arrays(block, columns)
        return arrays | word_arrays(texts, self.stop_words)

    def merge(self, shards: Sequence[Shard], target: Path, advance: Callable[[int], None]) -> dict[str, Any]:
        return merge_postings(shards, target, k1=self.k1, b=self.b, advance=advance)

    def workers(self, wanted: int) -> int:
        return wanted


def recipe_of(kind: str, settings: dict[str, Any]) -> Recipe:
    """What an index of this kind is made of. Raises ConfigError for an unknown kind or setting."""
    if kind == "bm25":
        made: Callable[..., Recipe] = Bm25Recipe
        known = {"k1", "b"}
    elif kind == "dense":
        from data.retrieval.index.dense_build import DENSE_SETTINGS, DenseRecipe

        made, known = DenseRecipe, set(DENSE_SETTINGS)
    else:
        raise ConfigError("unknown kind of index", where="kind", expected="bm25 or dense", found=kind)
    if unknown := sorted(set(settings) - known):
        expected = ", ".join(sorted(known))
        raise ConfigError(f"an index of kind {kind} has no such setting", expected=expected, found=", ".join(unknown))
    return made(**settings)
