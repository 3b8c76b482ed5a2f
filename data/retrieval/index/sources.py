"""Corpus files as blocks of raw records: what format a file has, how it is read in bounded memory, and where a record lies.

A file is recognised by its first bytes: Parquet, gzip, xz, else plain JSON lines. Blocks are cut by size, never in the middle
of a record, and always at the same places of the same content, so that work done for a block is found again by its hash.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from schemas.artifacts import file_errors
from schemas.errors import ArtifactError, ConfigError

LEAST_BLOCK_BYTES = 4 << 20
MOST_BLOCK_BYTES = 32 << 20
LONGEST_RECORD_BYTES = 64 << 20  # of one line: more is no passage, but another format or a decompression bomb
PARQUET_ROWS = 32768

_READ_BYTES = 1 << 20
_OPENERS: dict[bytes, Callable[[Any], Any]] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\x00": lzma.open}
_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)


@dataclass(frozen=True)
class Columns:
    """Which columns hold what. Absent `text`: `contents` if a record has it, else `text`. Absent `title`: the column `title`
    if a record has it, else the first line of a text that comes from `contents`, else none."""

    id: str = "id"
    title: str | None = None
    text: str | None = None


DEFAULT_COLUMNS = Columns()


@dataclass(frozen=True)
class Block:
    """Consecutive records of one file: JSON lines, or an Arrow stream. `first` is the number of its first record, counted in
    `unit` from 1; `position` how many bytes of the file were read when it was cut."""

    path: str
    first: int
    format: Literal["lines", "rows"]
    content: bytes
    position: int
    unit: Literal["line", "row", "passage"] = "line"

    def place(self, number: int) -> str:
        """Where the record with this number lies, for a message."""
        # Regrouped passages are counted through all files: `path` is only where the reading is.
        return f"{'the corpus' if self.unit == 'passage' else self.path}, {self.unit} {number}"

    def key(self, plan: str) -> str:
        """Hash of the content and of what is done with it, 32 hex digits."""
        state = hashlib.sha256(f"{self.format} {plan}\n".encode())
        state.update(self.content)
        return state.hexdigest()[:32]


def checked_paths(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The corpus files in order. Raises ConfigError for none, ArtifactError for one that is no readable file."""
    if not paths:
        raise ConfigError("no file of passages was given", expected="at least one", remedy="pass --passages FILE")
    checked = [Path(os.path.expanduser(path)) for path in paths]
    for path in checked:
        if not path.is_file():
            what = "is a directory" if path.is_dir() else "none"
            raise ArtifactError("the file of passages cannot be read", where=str(path), expected="a file", found=what)
    return checked


def block_bytes_for(paths: Sequence[Path]) -> int:
    """The size of a block: small corpora are cut so that several workers have something to do."""
    total = sum(path.stat().st_size for path in paths)
    return min(MOST_BLOCK_BYTES, max(LEAST_BLOCK_BYTES, total // 64))


def read_blocks(paths: Sequence[Path], block_bytes: int, columns: Columns) -> Iterator[Block]:
    """The records of all files in order, in blocks of about `block_bytes`.

    Raises ArtifactError for a file that is damaged, lacks a column, or changes while it is read.
    """
    for path in paths:
        with file_errors(path):
            before = os.stat(path)
            with open(path, "rb") as file:
                magic = file.read(8)
                file.seek(0)
                yield from (
                    _rows(path, file, columns) if magic[:4] == b"PAR1" else _lines(path, file, magic, block_bytes)
                )
            after = os.stat(path)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise ArtifactError(
                "the file of passages changed while it was read",
                where=str(path),
                remedy="run the same command again once it is written to its end",
            )


def _lines(path: Path, file: IO[bytes], magic: bytes, block_bytes: int) -> Iterator[Block]:
    opener = next((opener for mark, opener in _OPENERS.items() if magic.startswith(mark)), None)
    stream = file if opener is None else opener(file)
    first, kept, size = 1, [], 0
    while True:
        try:
            piece = stream.read(_READ_BYTES)
        except _DAMAGE as error:
            line = first + sum(part.count(b"\n") for part in kept)
            raise ArtifactError(
                "the compressed file is truncated or damaged",
                where=f"{path}, after line {line - 1}",
                found=str(error) or type(error).__name__,
                remedy="fetch or write the file again",
            ) from error
        kept.append(piece)
        size += len(piece)
        if piece and size < block_bytes:
            continue
        content = b"".join(kept)
        end = content.rfind(b"\n") + 1 if piece else len(content)
        if end:
            yield Block(str(path), first, "lines", content[:end], file.tell())
            first += content.count(b"\n", 0, end)
        if not piece:
            return
        # A record longer than a block makes its block longer.
        if len(content) - end > LONGEST_RECORD_BYTES:
            raise ArtifactError(
                "a line is too long for a passage",
                where=f"{path}, line {first}",
                expected=f"one JSON object a line, of at most {LONGEST_RECORD_BYTES} bytes",
                found=f"{len(content) - end} bytes without a line feed",
            )
        kept, size = [content[end:]], len(content) - end


def _rows(path: Path, file: IO[bytes], columns: Columns) -> Iterator[Block]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        names = _present_columns(path, table.schema_arrow.names, columns)
        first, size = 1, os.stat(path).st_size
        rows = max(1, table.metadata.num_rows)
        for batch in table.iter_batches(batch_size=_rows_of_a_block(table.metadata), columns=names):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            done = first - 1 + batch.num_rows
            yield Block(str(path), first, "rows", sink.getvalue().to_pybytes(), size * done // rows, "row")
            first += batch.num_rows
    except pa.ArrowException as error:
        raise ArtifactError(
            "the Parquet file is damaged", where=str(path), found=str(error), remedy="fetch or write the file again"
        ) from error


def _rows_of_a_block(metadata: Any) -> int:
    """As many as fit into a block on average: texts may be whole books."""
    size = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    return max(1, min(PARQUET_ROWS, MOST_BLOCK_BYTES * metadata.num_rows // max(1, size)))


def _present_columns(path: Path, names: Sequence[str], columns: Columns) -> list[str]:
    text = columns.text or ("contents" if "contents" in names else "text")
    title = columns.title or "title"
    needed = [columns.id, text, *([columns.title] if columns.title else [])]
    if missing := [name for name in needed if name not in names]:
        raise ArtifactError(
            f"the file has no column {missing[0]}",
            where=str(path),
            expected=", ".join(needed),
            found=", ".join(names),
            remedy="name the columns with --id-column, --title-column and --text-column",
        )
    return list(dict.fromkeys([*needed, *([title] if title in names else [])]))
