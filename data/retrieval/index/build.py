"""Building an index: read the corpus once in blocks, stage a shard for each, merge the shards, publish.

Reads the files of passages, writes `OUT` and, while it works, the hidden folder `.building-OUT` beside it. A build that is
killed goes on from the shards that were finished; a changed file or setting changes the names of the shards it concerns.
The published bytes depend on the passages and the settings alone: not on files, blocks, workers or interruptions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from data.retrieval import Passage
from data.retrieval.index.corpus import Corpus, corpus_hash
from data.retrieval.index.directory import ENDS, INDEX_KIND, INDEX_VERSION, TEXT, IndexDirectory
from data.retrieval.index.postings import ArrayFile
from data.retrieval.index.recipes import Recipe, recipe_of
from data.retrieval.index.shards import Shard, drop_staging, staging, staging_folder
from data.retrieval.index.sources import DEFAULT_COLUMNS, Columns
from data.retrieval.index.staged import Staged, stage_corpus
from data.retrieval.index.workers import default_workers
from schemas.artifacts import MANIFEST, file_errors, make_directory, publish_directory, sha256_json, write_file
from schemas.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from data.progress import Reporter

State = Literal["done", "up_to_date"]

_REPLACING = "replacing"


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

    bm25: `k1`, `b`; dense: see `data.retrieval.index.dense_build.DenseRecipe`. A second call does nothing. Raises ConfigError for
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


def ensure_index(
    corpus: Corpus,
    out: str | os.PathLike[str],
    recipe: Recipe,
    workers: int | None = None,
    reporter: Reporter | None = None,
    force: bool = False,
) -> tuple[IndexDirectory, State]:
    """`build_index`, and whether anything had to be done."""
    from data.progress import SilentReporter

    reporter = reporter or SilentReporter()
    if workers is not None and workers < 1:
        raise ConfigError("there must be a worker", where="workers", expected="1 or more", found=workers)
    count = recipe.workers(workers or default_workers())
    target = Path(os.path.realpath(os.path.expanduser(out)))
    existing = _existing(target, force)
    if existing is not None and _is_up_to_date(existing, corpus, recipe, count, reporter, force):
        if staging_folder(target).exists():  # killed after it had published
            with staging(target) as folder:
                drop_staging(folder)
        return existing, "up_to_date"
    with file_errors(target):
        make_directory(target.parent)
    with staging(target) as folder:
        if existing is None:  # another process may have published since
            existing = _existing(target, force)
            if existing is not None and _is_up_to_date(existing, corpus, recipe, count, reporter, force):
                drop_staging(folder)
                return existing, "up_to_date"
        shards = stage_corpus(corpus, recipe, folder, count, reporter)
        return _publish(target, folder, shards, recipe, reporter), "done"


def _existing(target: Path, force: bool) -> IndexDirectory | None:
    """The index that is there already. Raises ArtifactError for anything else that is there: it is not ours to replace."""
    if not target.exists():
        return None
    if target.is_dir() and not (target / MANIFEST).exists():
        if _is_left_of_an_index(target):
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


def _is_left_of_an_index(target: Path) -> bool:
    """Whether nothing is there but a part of the index that a build was replacing when it was killed."""
    try:
        replaced = json.loads((staging_folder(target) / _REPLACING).read_bytes())
    except (OSError, ValueError):
        replaced = []
    return {path.name for path in target.iterdir()} <= set(replaced)


def _is_up_to_date(
    index: IndexDirectory, corpus: Corpus, recipe: Recipe, workers: int, reporter: Reporter, force: bool
) -> bool:
    was, now = index.settings, recipe.settings
    changed = [
        f"{name} (was {str(was.get(name, 'none'))[:40]}, is {str(now.get(name, 'none'))[:40]})"
        for name in sorted({*was, *now})
        if was.get(name) != now.get(name)
    ]
    if not changed:
        reporter.stage("comparing passages", corpus.megabytes, "MB")
        found = corpus_hash(corpus, workers, reporter)
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


def _publish(target: Path, folder: Path, staged: Staged, recipe: Recipe, reporter: Reporter) -> IndexDirectory:
    settings = recipe.settings
    facts: dict[str, Any] = {
        "version": INDEX_VERSION,
        "corpus_sha256": staged.corpus_sha256,
        "index_id": sha256_json({"version": INDEX_VERSION, "corpus": staged.corpus_sha256, "settings": settings}),
        "passages": staged.passages,
        "settings": settings,
        "sources": recipe.sources,
    }

    def write(temporary: Path) -> None:
        _write_passages(staged.shards, temporary)
        # Read by publish_directory only once this function has ended.
        facts["figures"] = recipe.merge(staged.shards, temporary, reporter.advance)

    if target.exists():
        write_file(folder / _REPLACING, json.dumps(sorted(path.name for path in target.iterdir())).encode())
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
