"""Shards merged into the files that bm25s loads: `data`, `indices`, `indptr`, `vocab`, `params`.

Scores equal those of `bm25s.BM25(method="lucene").index` bit by bit: the same operations in the same order and precision.
Words are numbered in ascending order and merged range by range, so that memory holds the vocabulary, one length for each
passage and one range of postings, and every byte is read and written once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from data.retrieval.shards import Shard
from schemas.artifacts import file_errors
from schemas.errors import ArtifactError

RANGE_POSTINGS = 1 << 24
BM25S_FORMAT = "0.3.16"  # the release of bm25s whose files these are
DATA, INDICES, INDPTR = "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
VOCABULARY, PARAMETERS = "vocab.index.json", "params.index.json"
BM25_FILES = (DATA, INDICES, INDPTR, VOCABULARY, PARAMETERS)


class ArrayFile:
    """A `.npy` file of a known length, written piece by piece from its beginning."""

    def __init__(self, path: Path, dtype: str, shape: tuple[int, ...]) -> None:
        self._dtype = np.dtype(dtype)
        self._file = open(path, "wb")  # noqa: SIM115 - this object is the context manager
        header = {"descr": npy.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(self._file, header)

    def append(self, array: np.ndarray) -> None:
        """Write the next entries."""
        self._file.write(np.ascontiguousarray(array, self._dtype).data)

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(self, *details: object) -> None:
        self._file.close()


def merge_postings(
    shards: Sequence[Shard],
    target: Path,
    *,
    k1: float,
    b: float,
    advance: Callable[[int], None],
    range_postings: int = RANGE_POSTINGS,
) -> dict[str, int | float]:
    """Write the files of bm25s for the passages of all shards, in order; returns figures for the manifest.

    `advance` is told how many postings were written. Raises ArtifactError when no passage has a word.
    """
    vocabulary, places = _vocabulary(shards)
    if not vocabulary:
        raise ArtifactError("no passage of the corpus has a word that is searched", expected="words beside stop words")
    lengths = np.concatenate([shard.array("lengths") for shard in shards])
    starts = [shard.array("starts") for shard in shards]
    # The first column is the empty word, which bm25s expects to be there and which no passage holds.
    frequencies = np.zeros(len(vocabulary) + 1, np.int64)
    for place, start in zip(places, starts, strict=True):
        frequencies[place + 1] += np.diff(start)
    pointers = np.concatenate([np.zeros(1, np.int64), np.cumsum(frequencies)])
    total = int(pointers[-1])
    scores = _Scores(lengths, frequencies, k1, b)
    with file_errors(target):
        with ArrayFile(target / DATA, "<f4", (total,)) as data, ArrayFile(target / INDICES, "<i4", (total,)) as indices:
            for low, high in _ranges(pointers, range_postings):
                numbers, counts = _gather(shards, places, starts, pointers, low, high)
                columns = np.repeat(np.arange(low, high), frequencies[low:high])
                data.append(scores.of(columns, numbers, counts))
                indices.append(numbers)
                advance(len(numbers))
        with ArrayFile(target / INDPTR, "<i8", (len(pointers),)) as indptr:
            indptr.append(pointers)
        _write_vocabulary(target / VOCABULARY, vocabulary)
        parameters = {"k1": k1, "b": b, "delta": 0.5, "method": "lucene", "idf_method": "lucene", "dtype": "float32"}
        parameters |= {"int_dtype": "int32", "num_docs": len(lengths), "version": BM25S_FORMAT, "backend": "numpy"}
        (target / PARAMETERS).write_text(json.dumps(parameters, indent=1))
    return {"words": len(vocabulary), "postings": total, "mean_words": float(scores.mean_length)}


def _vocabulary(shards: Sequence[Shard]) -> tuple[list[bytes], list[np.ndarray]]:
    """All words, ascending, and for each shard the number of each of its words."""
    of_shard = [shard.array("words").tobytes().split(b"\n") if shard.length("words") else [] for shard in shards]
    everything = sorted(set().union(*of_shard))
    number = {word: place for place, word in enumerate(everything)}
    return everything, [np.fromiter((number[w] for w in words), np.int64, len(words)) for words in of_shard]


def _ranges(pointers: np.ndarray, most: int) -> list[tuple[int, int]]:
    """Columns in consecutive ranges of at most `most` postings, or of one column that has more."""
    ranges, low, last = [], 0, len(pointers) - 1
    while low < last:
        high = int(np.searchsorted(pointers, pointers[low] + most, side="right")) - 1
        ranges.append((low, max(low + 1, high)))
        low = ranges[-1][1]
    return ranges


def _gather(
    shards: Sequence[Shard],
    places: Sequence[np.ndarray],
    starts: Sequence[np.ndarray],
    pointers: np.ndarray,
    low: int,
    high: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Passage numbers and counts of the columns `[low, high)`, by column and then by passage."""
    size = int(pointers[high] - pointers[low])
    numbers, counts = np.empty(size, np.int32), np.empty(size, np.int32)
    heads = (pointers[low:high] - pointers[low]).copy()
    before = 0
    for shard, place, start in zip(shards, places, starts, strict=True):
        first, last = np.searchsorted(place, [low - 1, high - 1])  # column 0 is the empty word
        own = start[first : last + 1]
        if last > first and own[-1] > own[0]:
            columns = place[first:last] + 1 - low
            lengths = np.diff(own)
            to = np.repeat(heads[columns] - (own[:-1] - own[0]), lengths) + np.arange(own[-1] - own[0])
            numbers[to] = shard.array("texts", int(own[0]), int(own[-1])) + np.int32(before)
            counts[to] = shard.array("counts", int(own[0]), int(own[-1]))
            heads[columns] += lengths
        before += shard.length("lengths")
    return numbers, counts


class _Scores:
    """The score of each posting, method `lucene` of bm25s (Kamphuis et al. 2020)."""

    def __init__(self, lengths: np.ndarray, frequencies: np.ndarray, k1: float, b: float) -> None:
        size = len(lengths)
        self.mean_length = np.float64(int(lengths.sum(dtype=np.int64)) / size)
        self._lengths, self._k1, self._b = lengths, k1, b
        distinct = np.unique(frequencies)
        values = [math.log(1 + (size - df + 0.5) / (df + 0.5)) for df in distinct.tolist()]
        self._idf = np.array(values, np.float32)[np.searchsorted(distinct, frequencies)]

    def of(self, columns: np.ndarray, numbers: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """float32, shape (postings,)."""
        relative = self._b * self._lengths[numbers].astype(np.float64) / self.mean_length
        frequencies = counts.astype(np.float64)
        saturation = frequencies / (self._k1 * ((1 - self._b) + relative) + frequencies)
        return (self._idf[columns] * saturation).astype(np.float32)


def _write_vocabulary(path: Path, vocabulary: Sequence[bytes]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"":0')
        for number, word in enumerate(vocabulary, 1):
            # A word holds letters, digits and underscores only: nothing to escape.
            file.write(f',"{word.decode()}":{number}')
        file.write("}")
