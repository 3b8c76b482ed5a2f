"""The first half of a build: every block of the corpus becomes a shard, or is found as one, and ids are proved unique."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.retrieval.index.corpus import Corpus, Progress
from data.retrieval.index.passages import empty_corpus, repeated_id, suspects
from data.retrieval.index.recipes import Recipe
from data.retrieval.index.shards import SHARD_VERSION, Shard, shard_path, write_shard
from data.retrieval.index.sources import Block, Columns
from data.retrieval.index.workers import map_blocks
from schemas.artifacts import sha256_json
from schemas.errors import ArtifactError

if TYPE_CHECKING:
    from data.progress import Reporter

_MOST_PASSAGES = 2**31 - 1  # bm25s numbers passages with int32


@dataclass(frozen=True)
class Staged:
    """The shards of a corpus in order, where each began in its file, and the hash of all passages."""

    shards: list[Shard]
    blocks: list[Block]
    corpus_sha256: str
    passages: int

    def place(self, number: int) -> str:
        """Where the passage with this number lies."""
        for shard, block in zip(self.shards, self.blocks, strict=True):
            if number < shard.length("numbers"):
                return block.place(int(shard.array("numbers", number, number + 1)[0]))
            number -= shard.length("numbers")
        raise IndexError(number)

    def passage_id(self, number: int) -> str:
        """The id of the passage with this number."""
        for shard in self.shards:
            if number < shard.length("numbers"):
                ends = shard.array("ends", max(0, 3 * number - 1), 3 * number + 1).tolist()
                return shard.array("text", ends[0] if number else 0, ends[-1]).tobytes().decode()
            number -= shard.length("numbers")
        raise IndexError(number)


def stage_corpus(corpus: Corpus, recipe: Recipe, folder: Path, workers: int, reporter: Reporter) -> Staged:
    """The shards of a corpus in `folder`. Raises ArtifactError for a bad record, an empty corpus, an id that comes twice."""
    read, columns = recipe.blocks(corpus)
    plan = sha256_json([SHARD_VERSION, recipe.staged_by(), vars(columns)])

    def finished(block: Block) -> Path | None:
        path = shard_path(folder, block.key(plan))
        return path if path.exists() else None

    work = functools.partial(_stage_one, recipe=recipe, columns=columns, folder=folder, plan=plan)
    shards, blocks, count = [], [], 0
    state = hashlib.sha256()
    reporter.stage("reading passages", corpus.megabytes, "MB")
    watch = Progress(corpus, reporter)
    for block, path in map_blocks(work, read, workers, finished):
        shard = Shard(path)
        state.update(shard.array("digests").data)
        count += shard.length("numbers")
        watch.passed(block, shard.length("numbers"))
        shards.append(shard)
        blocks.append(block)
    reporter.done()
    staged = Staged(shards, blocks, state.hexdigest(), count)
    if not count:
        raise empty_corpus([Path(name) for name, _ in corpus.names] or None)
    if count > _MOST_PASSAGES:
        raise ArtifactError("the corpus is too large", expected=f"at most {_MOST_PASSAGES} passages", found=count)
    _refuse_repeated_ids(staged)
    return staged


def _stage_one(block: Block, recipe: Recipe, columns: Columns, folder: Path, plan: str) -> Path:
    path = shard_path(folder, block.key(plan))
    write_shard(path, recipe.arrays(block, columns))
    return path


def _refuse_repeated_ids(staged: Staged) -> None:
    hashes = np.concatenate([shard.array("id_hashes") for shard in staged.shards])
    numbers = suspects(hashes)
    holders: dict[int, list[int]] = {}
    for number, value in zip(numbers.tolist(), hashes[numbers].tolist(), strict=True):
        earlier = holders.setdefault(value, [])
        # Ids are read only where a hash comes again: a corpus that was given twice has as many suspects as passages.
        passage_id = staged.passage_id(number) if earlier else ""
        for other in earlier:
            if staged.passage_id(other) == passage_id:
                raise repeated_id(passage_id, staged.place(other), staged.place(number))
        earlier.append(number)
