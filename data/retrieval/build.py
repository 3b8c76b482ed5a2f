"""Building an index: read the corpus once in blocks, stage a shard for each, merge the shards, publish.

Reads the files of passages, writes `OUT` and, while it works, the hidden folder `.building-OUT` beside it. A build that is
killed goes on from the shards that were finished; a changed file or setting changes the names of the shards it concerns.
The published bytes depend on the passages and the settings alone: not on files, blocks, workers or interruptions.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from data.retrieval import Passage
from data.retrieval.index_directory import ENDS, INDEX_KIND, INDEX_VERSION, TEXT, IndexDirectory
from data.retrieval.passages import blocks_of, empty_corpus, parse_block, passage_digest, repeated_id
from data.retrieval.postings import ArrayFile, merge_postings
from data.retrieval.shards import (
    SHARD_VERSION,
    Shard,
    drop_staging,
    repeated_numbers,
    shard_path,
    stage_block,
    staging,
    staging_folder,
)
from data.retrieval.sources import DEFAULT_COLUMNS, Block, Columns, block_bytes_for, checked_paths, read_blocks
from data.retrieval.words import TOKEN_PATTERN
from data.retrieval.workers import default_workers, map_blocks
from schemas.artifacts import MANIFEST, file_errors, make_directory, publish_directory, sha256_json
from schemas.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from stages.stage import Reporter

State = Literal["done", "up_to_date"]

_REPLACING = "replacing"
_MOST_PASSAGES = 2**31 - 1  # bm25s numbers passages with int32


class Recipe(Protocol):
    """What an index of one kind is made of."""

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides the answers besides the passages, JSON values."""

    def staged_by(self) -> str:
        """Hashable text of those settings that decide what a shard holds."""

    def stage(self, block: Block, columns: Columns, folder: Path, key: str) -> Path:
        """Publish the shard of one block."""

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

    def stage(self, block: Block, columns: Columns, folder: Path, key: str) -> Path:
        return stage_block(block, columns, folder, key, self.stop_words)

    def merge(self, shards: Sequence[Shard], target: Path, advance: Callable[[int], None]) -> dict[str, Any]:
        return merge_postings(shards, target, k1=self.k1, b=self.b, advance=advance)

    def workers(self, wanted: int) -> int:
        return wanted


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


def build_index(
    passages_paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    kind: str = "bm25",
    workers: int | None = None,
    reporter: Reporter | None = None,
    force: bool = False,
    columns: Columns = DEFAULT_COLUMNS,
    **settings: Any,
) -> IndexDirectory:
    """The index of the passages in some files, built if it is not there; `settings` are those of the kind.

    bm25: `k1`, `b`; dense: see `data.retrieval.dense_build.DenseRecipe`. A second call does nothing. Raises ConfigError for
    a wrong setting, ArtifactError for a bad corpus (with file and line) and for an index at `out` that was made from other
    passages or settings unless `force`, LockError when another process builds it, RsipoError for a full disk.
    """
    recipe = recipe_of(kind, settings)
    return ensure_index(Corpus.of_files(passages_paths, columns), out, recipe, workers, reporter, force)[0]


def build_index_from(
    passages: Iterable[Passage],
    out: str | os.PathLike[str],
    *,
    kind: str = "bm25",
    workers: int | None = 1,
    reporter: Reporter | None = None,
    force: bool = False,
    **settings: Any,
) -> IndexDirectory:
    """As `build_index`, for passages in memory: equal passages give equal bytes."""
    recipe = recipe_of(kind, settings)
    return ensure_index(Corpus.of_passages(passages), out, recipe, workers, reporter, force)[0]


def recipe_of(kind: str, settings: dict[str, Any]) -> Recipe:
    """What an index of this kind is made of. Raises ConfigError for an unknown kind or setting."""
    if kind == "bm25":
        made: Callable[..., Recipe] = Bm25Recipe
        known = {"k1", "b"}
    elif kind == "dense":
        from data.retrieval.dense_build import DENSE_SETTINGS, DenseRecipe

        made, known = DenseRecipe, set(DENSE_SETTINGS)
    else:
        raise ConfigError("unknown kind of index", where="kind", expected="bm25 or dense", found=kind)
    if unknown := sorted(set(settings) - known):
        expected = ", ".join(sorted(known))
        raise ConfigError(f"an index of kind {kind} has no such setting", expected=expected, found=", ".join(unknown))
    return made(**settings)


def ensure_index(
    corpus: Corpus,
    out: str | os.PathLike[str],
    recipe: Recipe,
    workers: int | None = None,
    reporter: Reporter | None = None,
    force: bool = False,
) -> tuple[IndexDirectory, State]:
    """`build_index`, and whether anything had to be done."""
    from stages.stage import SilentReporter

    reporter = reporter or SilentReporter()
    if workers is not None and workers < 1:
        raise ConfigError("there must be a worker", where="workers", expected="1 or more", found=workers)
    count = recipe.workers(workers or default_workers())
    target = Path(os.path.realpath(Path(out).expanduser()))
    existing = _existing(target, force)
    if existing is not None and _is_up_to_date(existing, corpus, recipe, count, reporter, force):
        return existing, "up_to_date"
    with file_errors(target):
        make_directory(target.parent)
    with staging(target) as folder:
        shards = _stage(corpus, recipe, folder, count, reporter)
        return _publish(target, folder, shards, recipe, reporter), "done"


def _existing(target: Path, force: bool) -> IndexDirectory | None:
    """The index that is there already. Raises ArtifactError for anything else that is there: it is not ours to replace."""
    if not target.exists():
        return None
    if target.is_dir() and not (target / MANIFEST).exists():
        # A build killed while it replaced an index has left a part of the old one.
        if not any(target.iterdir()) or (staging_folder(target) / _REPLACING).exists():
            return None
    elif target.is_dir():
        try:
            return IndexDirectory.open(target)
        except ArtifactError:
            if not force or INDEX_KIND not in (target / MANIFEST).read_text(errors="replace"):
                raise
            return None
    raise ArtifactError(
        "something else is where the index should be", where=str(target), remedy="choose another --out, or remove it"
    )


def _is_up_to_date(
    index: IndexDirectory, corpus: Corpus, recipe: Recipe, workers: int, reporter: Reporter, force: bool
) -> bool:
    was, now = index.settings, recipe.settings
    changed = [
        f"{name} (was {was.get(name, 'none')}, is {now.get(name, 'none')})"
        for name in sorted({*was, *now})
        if was.get(name) != now.get(name)
    ]
    if not changed:
        reporter.stage("comparing passages", _megabytes(corpus), "MB")
        found = _corpus_hash(corpus, workers, reporter)
        reporter.done()
        if found != index.corpus_sha256:
            changed = [f"passages (were {index.corpus_sha256[:12]}, are {found[:12]})"]
    if changed and not force:
        raise ArtifactError(
            "the index was built from other input",
            where=str(index.path),
            found=", ".join(changed),
            remedy="pass --force to build it anew, or choose another --out",
        )
    if force and not changed:
        try:
            index.verify()
        except ArtifactError:
            return False
    return not changed


def _digests_of(block: Block, columns: Columns) -> bytes:
    return b"".join(
        passage_digest(passage.passage_id.encode(), passage.title.encode(), passage.text.encode())
        for _, passage in parse_block(block, columns)
    )


def _corpus_hash(corpus: Corpus, workers: int, reporter: Reporter) -> str:
    state = hashlib.sha256()
    watch = _Progress(corpus, reporter)
    work = functools.partial(_digests_of, columns=corpus.columns)
    for block, digests in map_blocks(work, corpus.blocks(), workers):
        state.update(digests)
        watch.passed(block, len(digests) // 32)
    return state.hexdigest()


@dataclass(frozen=True)
class _Staged:
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
                low, high = (int(e) for e in [0, *shard.array("ends", 0, 3 * number + 1)][-2:])
                return shard.array("text", low, high).tobytes().decode()
            number -= shard.length("numbers")
        raise IndexError(number)


def _stage(corpus: Corpus, recipe: Recipe, folder: Path, workers: int, reporter: Reporter) -> _Staged:
    plan = sha256_json([SHARD_VERSION, recipe.staged_by(), vars(corpus.columns)])

    def finished(block: Block) -> Path | None:
        path = shard_path(folder, block.key(plan))
        return path if path.exists() else None

    work = functools.partial(_stage_one, recipe=recipe, columns=corpus.columns, folder=folder, plan=plan)
    shards, blocks, count = [], [], 0
    state = hashlib.sha256()
    reporter.stage("reading passages", _megabytes(corpus), "MB")
    watch = _Progress(corpus, reporter)
    for block, path in map_blocks(work, corpus.blocks(), workers, finished):
        shard = Shard(path)
        state.update(shard.array("digests").data)
        count += shard.length("numbers")
        watch.passed(block, shard.length("numbers"))
        shards.append(shard)
        blocks.append(block)
    reporter.done()
    staged = _Staged(shards, blocks, state.hexdigest(), count)
    if not count:
        raise empty_corpus([Path(name) for name, _ in corpus.names] or None)
    if count > _MOST_PASSAGES:
        raise ArtifactError("the corpus is too large", expected=f"at most {_MOST_PASSAGES} passages", found=count)
    _refuse_repeated_ids(staged)
    return staged


def _stage_one(block: Block, recipe: Recipe, columns: Columns, folder: Path, plan: str) -> Path:
    return recipe.stage(block, columns, folder, block.key(plan))


def _refuse_repeated_ids(staged: _Staged) -> None:
    hashes = np.concatenate([shard.array("id_hashes") for shard in staged.shards])
    for first, second in repeated_numbers(hashes):
        if (passage_id := staged.passage_id(first)) == staged.passage_id(second):
            raise repeated_id(passage_id, staged.place(first), staged.place(second))


def _publish(target: Path, folder: Path, staged: _Staged, recipe: Recipe, reporter: Reporter) -> IndexDirectory:
    settings = recipe.settings
    facts: dict[str, Any] = {
        "version": INDEX_VERSION,
        "corpus_sha256": staged.corpus_sha256,
        "index_id": sha256_json({"version": INDEX_VERSION, "corpus": staged.corpus_sha256, "settings": settings}),
        "passages": staged.passages,
        "settings": settings,
    }

    def write(temporary: Path) -> None:
        _write_passages(staged.shards, temporary)
        # Read by publish_directory only once this function has ended.
        facts["figures"] = recipe.merge(staged.shards, temporary, reporter.advance)

    if target.exists():
        with file_errors(folder):
            (folder / _REPLACING).touch()
    units = sum(shard.length("texts") for shard in staged.shards) if settings["kind"] == "bm25" else staged.passages
    reporter.stage("writing the index", units, "postings" if settings["kind"] == "bm25" else "vectors")
    inputs = {"corpus": staged.corpus_sha256, "settings": sha256_json(settings)}
    publish_directory(target, kind=INDEX_KIND, inputs=inputs, write=write, extra=facts, replace=True)
    reporter.done()
    drop_staging(folder)
    return IndexDirectory.open(target)


def _write_passages(shards: Sequence[Shard], target: Path) -> None:
    count = sum(shard.length("ends") for shard in shards)
    before = 0
    with open(target / TEXT, "wb") as text, ArrayFile(target / ENDS, "<i8", (count,)) as ends:
        for shard in shards:
            text.write(shard.array("text").data)
            ends.append(shard.array("ends") + before)
            before += shard.length("text")


def _megabytes(corpus: Corpus) -> int | None:
    return math.ceil(sum(size for _, size in corpus.names) / 1e6) if corpus.names else None


class _Progress:
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
