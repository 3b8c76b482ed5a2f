"""A corpus as a build sees it: blocks of records that can be read again and again, its hash, how far a reading is."""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data.retrieval import Passage
from data.retrieval.index.passages import blocks_of, parse_block, passage_digest
from data.retrieval.index.sources import Block, Columns, block_bytes_for, checked_paths, read_blocks
from data.retrieval.index.workers import map_blocks

if TYPE_CHECKING:
    from data.progress import Reporter


@dataclass(frozen=True)
class Corpus:
    """Where passages come from: `blocks` reads them anew each time; `names` are the files and their sizes."""

    blocks: Callable[[], Iterator[Block]]
    columns: Columns
    names: tuple[tuple[str, int], ...]

    @classmethod
    def of_files(cls, paths: Sequence[str | os.PathLike[str]], columns: Columns) -> Corpus:
        """Files of passages, in order."""
        checked = checked_paths(paths)
        size = block_bytes_for(checked)
        names = tuple((str(path), path.stat().st_size) for path in checked)
        return cls(lambda: read_blocks(checked, size, columns), columns, names)

    @classmethod
    def of_passages(cls, passages: Iterable[Passage]) -> Corpus:
        """Passages that are in memory."""
        kept = tuple(passages)
        return cls(lambda: blocks_of(kept), Columns("id", "title", "text"), ())

    @property
    def megabytes(self) -> int | None:
        """Size of the files, compressed if they are; None for passages in memory."""
        return math.ceil(sum(size for _, size in self.names) / 1e6) if self.names else None


def _digests_of(block: Block, columns: Columns) -> bytes:
    return b"".join(
        passage_digest(passage.passage_id.encode(), passage.title.encode(), passage.text.encode())
        for _, passage in parse_block(block, columns)
    )


def corpus_hash(corpus: Corpus, workers: int, reporter: Reporter) -> str:
    """The hash of a corpus, see `data.retrieval.index.passages.corpus_sha256`, worked out by several processes."""
    state = hashlib.sha256()
    watch = Progress(corpus, reporter)
    work = functools.partial(_digests_of, columns=corpus.columns)
    for block, digests in map_blocks(work, corpus.blocks(), workers):
        state.update(digests)
        watch.passed(block, len(digests) // 32)
    return state.hexdigest()


class Progress:
    """Tells the reporter how much of the files was read, in whole megabytes."""

    def __init__(self, corpus: Corpus, reporter: Reporter) -> None:
        self._reporter = reporter
        self._files = list(corpus.names)
        self._before, self._told, self._passages = 0, 0, 0

    def passed(self, block: Block, passages: int) -> None:
        """One more block is done."""
        self._passages += passages
        if not self._files:
            self._reporter.advance(0, passages=self._passages)
            return
        while self._files[0][0] != block.path:
            self._before += self._files.pop(0)[1]
        now = round((self._before + block.position) / 1e6)
        self._reporter.advance(now - self._told, passages=self._passages)
        self._told = now
