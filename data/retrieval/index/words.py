"""How a text becomes words: the rules of bm25s, for passages and queries alike.

Lower case, every run of at least two letters, digits or underscores, without the stop words; no stemming. Words are UTF-8
bytes here: for ASCII texts, which most are, translating and splitting bytes is several times faster than the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

# The same runs as the pattern of bm25s: greedy matching makes its word boundaries redundant.
TOKEN_PATTERN = r"(?u)\b\w\w+\b"
_RUNS = re.compile(r"\w\w+").findall

_WORD_BYTES = b"abcdefghijklmnopqrstuvwxyz0123456789_"
_TABLE = bytes(code if code in _WORD_BYTES else 32 for code in bytes(range(256)).lower())
_SINGLE = [bytes([code]) for code in _WORD_BYTES]


def raw_words(text: str) -> list[bytes]:
    """The runs of a text in order, stop words among them, and for ASCII texts also runs of one character."""
    if text.isascii():
        return text.encode().translate(_TABLE).split()
    return [word.encode() for word in _RUNS(text.lower())]


def query_words(text: str, stop_words: Iterable[str]) -> list[str]:
    """The words of a query in order, repetitions kept.

    >>> query_words("Who is the mayor of St. Aru-12?", ["is", "the", "of"])
    ['who', 'mayor', 'st', 'aru', '12']
    """
    ignored = {word.encode() for word in stop_words}
    return [word.decode() for word in raw_words(text) if word not in ignored and (len(word) > 1)]


class _Numbering(dict[bytes, int]):
    """Numbers words in the order of their first appearance."""

    def __missing__(self, word: bytes) -> int:
        number = self[word] = self.next
        self.next += 1
        return number

    next = 0


class WordCounts:
    """How often every word of a batch of texts comes in each.

    `words` ascending; the postings of word w are `[starts[w], starts[w + 1])` of `texts` (ascending numbers) and `counts`;
    `lengths` is the number of words of every text, stop words left out.
    """

    def __init__(self, texts: Iterable[str], stop_words: Iterable[str]) -> None:
        numbering = _Numbering((word, -1) for word in _SINGLE)
        numbering.update((word.encode(), -1) for word in stop_words)
        ignored = len(numbering)
        number_of = numbering.__getitem__
        numbers, raw_lengths = [], []
        for text in texts:
            words = raw_words(text)
            raw_lengths.append(len(words))
            numbers.append(np.fromiter(map(number_of, words), np.int32, len(words)))
        found = np.concatenate([*numbers, np.empty(0, np.int32)])
        size = len(raw_lengths)
        holders = np.repeat(np.arange(size, dtype=np.int64), raw_lengths)
        kept = found >= 0
        found, holders = found[kept], holders[kept]
        self.lengths = np.bincount(holders, minlength=size).astype(np.int32)
        vocabulary = list(numbering)[ignored:]
        self.words: list[bytes] = sorted(vocabulary)
        place = {word: number for number, word in enumerate(self.words)}
        ranks = np.fromiter((place[word] for word in vocabulary), np.int64, len(vocabulary))
        self._count(ranks[found], holders, size)

    def _count(self, ranks: np.ndarray, holders: np.ndarray, size: int) -> None:
        bits = max(1, size.bit_length())
        keys = (ranks << bits) | holders
        keys.sort()
        first = np.flatnonzero(np.concatenate([np.ones(min(1, len(keys)), bool), keys[1:] != keys[:-1]]))
        pairs = keys[first]
        self.texts = (pairs & ((1 << bits) - 1)).astype(np.int32)
        self.counts = np.diff(first, append=len(keys)).astype(np.int32)
        self.starts = np.searchsorted(pairs >> bits, np.arange(len(self.words) + 1)).astype(np.int64)
