"""Shards merged into the files that bm25s loads: `data`, `indices`, `indptr`, `vocab`, `params`.

Scores equal those of `bm25s.BM25(method="lucene").index` bit by bit: the same operations in the same order and precision.
Words are numbered in ascending order and merged range by range, so that memory holds the vocabulary, one length for each
passage and one range of postings, and every byte is read and written once.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from data.retrieval.index.shards import Shard
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
    vocabulary = _vocabulary(shards)
    if not vocabulary:
        raise ArtifactError("no passage of the corpus has a word that is searched", expected="words beside stop words")
    lengths = np.concatenate([shard.array("lengths") for shard in shards])
    # The first column is the empty word, which bm25s expects to be there and which no passage holds.
    frequencies = np.zeros(len(vocabulary) + 1, np.int64)
    columns_of = _columns(shards, vocabulary, target.parent)
    for shard, own in zip(shards, columns_of, strict=True):
        frequencies[own] += np.diff(shard.array("starts"))
    pointers = np.concatenate([np.zeros(1, np.int64), np.cumsum(frequencies)])
    total = int(pointers[-1])
    scores = _Scores(lengths, frequencies, k1, b)
    with file_errors(target):
        with ArrayFile(target / DATA, "<f4", (total,)) as data, ArrayFile(target / INDICES, "<i4", (total,)) as indices:
            for low, high in _ranges(pointers, range_postings):
                numbers, counts = _gather(shards, columns_of, pointers, low, high)
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


def _words(shard: Shard) -> list[bytes]:
    return shard.array("words").tobytes().split(b"\n") if shard.length("words") else []


def _vocabulary(shards: Sequence[Shard]) -> list[bytes]:
    """All words, ascending."""
    everything: set[bytes] = set()
    for shard in shards:
        everything.update(_words(shard))
    return sorted(everything)


def _columns(shards: Sequence[Shard], vocabulary: Sequence[bytes], scratch: Path) -> list[np.ndarray]:
    """For each shard the column of each of its words, ascending; int32, mapped on a file that has no name.

    Together the shards hold many times the words of the vocabulary: too many for memory.
    """
    number = {word: place for place, word in enumerate(vocabulary, 1)}
    ends = [0]
    with file_errors(scratch), tempfile.TemporaryFile(dir=scratch) as file:
        for shard in shards:
            words = _words(shard)
            file.write(np.fromiter((number[word] for word in words), np.int32, len(words)).data)
            ends.append(ends[-1] + len(words))
        file.flush()
        mapped = np.asarray(np.memmap(file, np.int32, "r", shape=(ends[-1],)))
    return [mapped[low:high] for low, high in itertools.pairwise(ends)]


def _ranges(pointers: np.ndarray, most: int) -> list[tuple[int, int]]:
    """Columns in consecutive ranges of at most `most` postings, or of one column that has more."""
    ranges, low, last = [], 0, len(pointers) - 1
    while low < last:
        high = int(np.searchsorted(pointers, pointers[low] + most, side="right")) - 1
        ranges.append((low, max(low + 1, high)))
        low = ranges[-1][1]
    return ranges


def _gather(
    shards: Sequence[Shard], columns_of: Sequence[np.ndarray], pointers: np.ndarray, low: int, high: int
) -> tuple[np.ndarray, np.ndarray]:
    """Passage numbers and counts of the columns `[low, high)`, by column and then by passage."""
    size = int(pointers[high] - pointers[low])
    numbers, counts = np.empty(size, np.int32), np.empty(size, np.int32)
    heads = pointers[low:high] - pointers[low]  # where the next posting of each column goes
    before = 0
    for shard, own in zip(shards, columns_of, strict=True):
        first, last = np.searchsorted(own, [low, high])
        if first < last:
            starts = shard.array("starts", int(first), int(last) + 1)
            begin, end = int(starts[0]), int(starts[-1])
            columns = own[first:last] - low
            lengths = np.diff(starts)
            to = np.repeat(heads[columns] - (starts[:-1] - begin), lengths) + np.arange(end - begin)
            numbers[to] = shard.array("texts", begin, end) + np.int32(before)
            counts[to] = shard.array("counts", begin, end)
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
