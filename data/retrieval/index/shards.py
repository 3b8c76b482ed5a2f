"""Finished work of an interrupted build: one file for each block of the corpus, published whole, found again by its hash.

A shard is a line of JSON that names its arrays, and the arrays. Its name carries the hash of the block's content and of all
that decides the arrays, so that a shard is right if it is there. Shards live in a hidden folder beside the index that is
built, and go when it is published.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from data.retrieval.index.passages import id_hash, indexed_text, parse_block, passage_digest
from data.retrieval.index.sources import Block, Columns
from data.retrieval.index.words import WordCounts
from schemas.artifacts import file_errors, fsync_path, make_directory, remove_leftovers, temporary_sibling
from schemas.errors import LockError

SHARD_VERSION = 1
STAGING_PREFIX = ".building-"

_ALIGNMENT = 64


def write_shard(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Publish one-dimensional arrays as one file, all or nothing."""
    names = {name: [array.dtype.str, array.shape[0]] for name, array in arrays.items()}
    head = json.dumps(names).encode()
    temporary = temporary_sibling(path)
    with file_errors(path):
        try:
            with open(temporary, "wb") as file:
                file.write(head + b" " * (-(len(head) + 1) % _ALIGNMENT) + b"\n")
                for array in arrays.values():
                    file.write(np.ascontiguousarray(array).data)
                    file.write(bytes(-array.nbytes % _ALIGNMENT))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


class Shard:
    """A shard on disk; arrays are mapped when asked for, not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, tuple[np.dtype, int, int]] = {}
        with file_errors(path), open(path, "rb") as file:
            head = file.readline()
        offset = len(head)
        for name, (dtype, length) in json.loads(head).items():
            kind = np.dtype(dtype)
            self._places[name] = (kind, length, offset)
            size = kind.itemsize * length
            offset += size + -size % _ALIGNMENT

    def length(self, name: str) -> int:
        """Entries of one array."""
        return self._places[name][1]

    def array(self, name: str, start: int = 0, end: int | None = None) -> np.ndarray:
        """A part of an array, read from the disk."""
        kind, length, offset = self._places[name]
        end = length if end is None else min(end, length)
        with file_errors(self.path):
            return np.fromfile(self.path, kind, max(0, end - start), offset=offset + start * kind.itemsize)


def passage_arrays(block: Block, columns: Columns) -> tuple[dict[str, np.ndarray], list[str]]:
    """What every shard holds of its passages, and their searched texts. Raises ArtifactError for what is no passage.

    `text`: id, title and text of each, one after the other; `ends`: int64, where each of these fields ends; `digests`: 32
    bytes each; `id_hashes`: uint64; `numbers`: int64, their lines or rows.
    """
    fields: list[bytes] = []
    digests, hashes, numbers, texts = [], [], [], []
    for number, passage in parse_block(block, columns):
        parts = (passage.passage_id.encode(), passage.title.encode(), passage.text.encode())
        fields.extend(parts)
        digests.append(passage_digest(*parts))
        hashes.append(id_hash(passage.passage_id))
        numbers.append(number)
        texts.append(indexed_text(passage))
    arrays = {
        "text": np.frombuffer(b"".join(fields), np.uint8),
        "ends": np.cumsum(np.fromiter(map(len, fields), np.int64, len(fields))),
        "digests": np.frombuffer(b"".join(digests), np.uint8),
        "id_hashes": np.frombuffer(b"".join(hashes), np.uint64),
        "numbers": np.array(numbers, np.int64),
    }
    return arrays, texts


def word_arrays(texts: Sequence[str], stop_words: Iterable[str]) -> dict[str, np.ndarray]:
    """What a shard of a BM25 index also holds, see `WordCounts`; `words` are joined by line feeds."""
    counted = WordCounts(texts, stop_words)
    return {
        "words": np.frombuffer(b"\n".join(counted.words), np.uint8),
        "starts": counted.starts,
        "texts": counted.texts,
        "counts": counted.counts,
        "lengths": counted.lengths,
    }


def shard_path(folder: Path, key: str) -> Path:
    """Where the shard of a block lies."""
    return folder / f"shard-{key}"


def staging_folder(out: Path) -> Path:
    """The hidden folder in which the index `out` is prepared."""
    return out.parent / f"{STAGING_PREFIX}{out.name}"


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """The staging folder of an index, held by this process alone; it stays when the block fails, so that work is kept.

    Raises LockError (exit code 4) while another process builds the same index.
    """
    folder = staging_folder(out)
    with file_errors(folder):
        while True:
            make_directory(folder)
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                _lock(descriptor, out)
                # Whoever held it before may have removed the folder after this process opened it.
                if folder.exists() and os.fstat(descriptor).st_ino == folder.stat().st_ino:
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        try:
            remove_leftovers(folder)
            yield folder
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()  # nothing was staged, so nothing is kept
            os.close(descriptor)


def _lock(descriptor: int, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LockError(
            "another process builds this index",
            where=str(out),
            remedy="wait until it has ended, or choose another --out",
        ) from error


def drop_staging(folder: Path) -> None:
    """Remove a staging folder whose index was published."""
    shutil.rmtree(folder, ignore_errors=True)
    fsync_path(folder.parent)
