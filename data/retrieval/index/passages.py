"""Records as passages: which columns mean what, what a record may not be, and the hash of a corpus.

Understood are `id` with `contents` (as in the corpus of Search-R1: the quoted title on the first line, then the text), and
`id`, `title`, `text`; other names are mapped by `Columns`. Whatever the file, equal passages in equal order have one hash.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.retrieval import Passage
from data.retrieval.index.sources import DEFAULT_COLUMNS, Block, Columns, block_bytes_for, checked_paths, read_blocks
from schemas.errors import ArtifactError

_REMEDY = "name the columns with --id-column, --title-column and --text-column"
_BLOCK_PASSAGES = 8192


def read_passages(
    paths: Sequence[str | os.PathLike[str]], columns: Columns = DEFAULT_COLUMNS, *, unique: bool = True
) -> Iterator[Passage]:
    """The passages of JSON lines (plain, gzip, xz) or Parquet files, in order, in bounded memory.

    Raises ArtifactError that names file and line for a record that is no passage and, once all is read, for an empty corpus
    and, with `unique`, for an id that comes twice (which costs 8 bytes for each passage).
    """
    checked = checked_paths(paths)
    hashes = array("Q")
    for block in read_blocks(checked, block_bytes_for(checked), columns):
        for _, passage in parse_block(block, columns):
            hashes.append(int.from_bytes(id_hash(passage.passage_id), "little") if unique else 0)
            yield passage
    if not hashes:
        raise empty_corpus(checked)
    if unique and len(numbers := suspects(np.frombuffer(hashes, np.uint64))):
        _refuse_repeated(checked, columns, set(numbers.tolist()))


def _refuse_repeated(paths: Sequence[Path], columns: Columns, numbers: set[int]) -> None:
    """Read the passages again that have equal id hashes; raises for the first id that comes again."""
    seen: dict[str, str] = {}
    count = 0
    for block in read_blocks(paths, block_bytes_for(paths), columns):
        for line, passage in parse_block(block, columns):
            if count in numbers:
                if passage.passage_id in seen:
                    raise repeated_id(passage.passage_id, seen[passage.passage_id], block.place(line))
                seen[passage.passage_id] = block.place(line)
            count += 1


def suspects(hashes: np.ndarray) -> np.ndarray:
    """Numbers of the passages whose id hash (uint64) another one has, ascending; their ids may still be different."""
    ordered = np.sort(hashes)
    return np.flatnonzero(np.isin(hashes, ordered[1:][ordered[1:] == ordered[:-1]]))


def repeated_id(passage_id: str, first: str, second: str) -> ArtifactError:
    """The error for an id that comes twice."""
    return ArtifactError(
        "two passages have the same id",
        where=f"{first}, and {second}",
        found=f"id {json.dumps(passage_id[:80], ensure_ascii=False)} twice",
        remedy="ids must be unique in the whole corpus",
    )


def empty_corpus(paths: Sequence[Path] | None) -> ArtifactError:
    """The error for a corpus without passages."""
    where = None if paths is None else ", ".join(str(path) for path in paths)
    return ArtifactError("the corpus has no passage", where=where, expected="at least one passage")


def parse_block(block: Block, columns: Columns) -> Iterator[tuple[int, Passage]]:
    """The passages of a block with the number of their line or row. Raises ArtifactError for a record that is none."""
    records = _json_lines(block) if block.format == "lines" else _arrow_rows(block)
    for number, record in records:
        try:
            yield number, passage_of(record, columns)
        except ArtifactError as error:
            raise ArtifactError(
                error.what,
                where=block.place(number),
                expected=error.expected,
                found=error.found,
                remedy=error.remedy,
            ) from None


def _json_lines(block: Block) -> Iterator[tuple[int, Mapping[str, Any]]]:
    content = block.content.removeprefix(b"\xef\xbb\xbf") if block.first == 1 else block.content
    for number, line in enumerate(content.split(b"\n"), block.first):
        if not line or line.isspace():
            continue
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError) as error:  # JSON or UTF-8
            found = f"{error}, in {line[:60]!r}"
            raise ArtifactError("a line is not JSON", where=block.place(number), found=found) from None
        if not isinstance(record, dict):
            found = f"{type(record).__name__} {str(record)[:60]!r}"
            raise ArtifactError(
                "a line is not a passage", where=block.place(number), expected="a JSON object", found=found
            )
        yield number, record


def _arrow_rows(block: Block) -> Iterator[tuple[int, Mapping[str, Any]]]:
    import pyarrow as pa

    with pa.ipc.open_stream(block.content) as stream:
        table = stream.read_all()
    try:
        yield from enumerate(table.to_pylist(), block.first)
    except UnicodeDecodeError:
        yield from _rows_one_by_one(block, table)


def _rows_one_by_one(block: Block, table: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows before the one whose text is no UTF-8, which some writers let pass; raises ArtifactError for that one."""
    for number in range(table.num_rows):
        try:
            [record] = table.slice(number, 1).to_pylist()
        except UnicodeDecodeError as error:
            place = block.place(block.first + number)
            raise ArtifactError("a row is not UTF-8 text", where=place, found=str(error)) from None
        yield block.first + number, record


def passage_of(record: Mapping[str, Any], columns: Columns = DEFAULT_COLUMNS) -> Passage:
    """One record as a passage. Raises ArtifactError without a place.

    >>> passage_of({"id": 7, "contents": '"Mount Aru"\\nA mountain.'})
    Passage(passage_id='7', title='Mount Aru', text='A mountain.')
    """
    text_column = columns.text or ("contents" if "contents" in record else "text")
    for name in (columns.id, text_column, columns.title):
        if name is not None and name not in record:
            found = ", ".join(str(key)[:40] for key in itertools.islice(record, 12)) or "none"
            raise ArtifactError(f"a passage has no column {name}", found=found, remedy=_REMEDY)
    identity, text = record[columns.id], record[text_column]
    title = record.get(columns.title or "title")
    if isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    if not isinstance(identity, str) or not identity:
        raise ArtifactError(f"a passage has no id in column {columns.id}", found=_short(identity))
    if not isinstance(text, str) or not (text and not text.isspace()):
        raise ArtifactError(f"a passage has no text in column {text_column}", found=_short(text))
    if title is None:
        title = ""
        if columns.title is None and columns.text is None and text_column == "contents":
            title, text = split_contents(text)
    if not isinstance(title, str):
        raise ArtifactError("the title of a passage is not text", found=_short(title))
    if not (identity.isascii() and title.isascii() and text.isascii()):
        _refuse_lone_surrogates(identity + title + text)
    return Passage(identity, title, text)


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of the one-column form; a single line is a text without title.

    >>> split_contents('"Mount Aru"\\nA mountain.')
    ('Mount Aru', 'A mountain.')
    """
    head, newline, rest = contents.partition("\n")
    if not newline or not rest.strip():
        return "", contents
    head = head.strip()
    return (head[1:-1] if len(head) > 1 and head[0] == head[-1] == '"' else head), rest


def _refuse_lone_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArtifactError(
            "a passage holds half a surrogate pair, which no text may", found=ascii(text[error.start : error.end])
        ) from None


def _short(value: object) -> str:
    return "nothing" if value is None or value == "" else repr(value)[:60]


def indexed_text(passage: Passage) -> str:
    """What of a passage is searched: its title and its text."""
    return f"{passage.title}\n{passage.text}"


def id_hash(passage_id: str) -> bytes:
    """8 bytes that are equal for equal ids."""
    return hashlib.blake2b(passage_id.encode(), digest_size=8).digest()


def passage_digest(identity: bytes, title: bytes, text: bytes) -> bytes:
    """32 bytes that name one passage: its fields in UTF-8, each after its length."""
    head = b"%d %d %d\n" % (len(identity), len(title), len(text))
    return hashlib.sha256(head + identity + title + text).digest()


def corpus_sha256(passages: Iterable[Passage]) -> str:
    """Hash of a sequence of passages, whatever file or memory they come from: sha256 of their digests in order."""
    state = hashlib.sha256()
    for passage in passages:
        state.update(passage_digest(passage.passage_id.encode(), passage.title.encode(), passage.text.encode()))
    return state.hexdigest()


def blocks_of(passages: Iterable[Passage]) -> Iterator[Block]:
    """Passages of this process as blocks, as if they came from a file with the columns id, title and text."""
    first, iterator = 1, iter(passages)
    while chunk := list(itertools.islice(iterator, _BLOCK_PASSAGES)):
        yield _block_of(chunk, "the given passages", first, 0)
        first += len(chunk)


def regrouped(blocks: Iterable[Block], columns: Columns, size: int) -> Iterator[Block]:
    """The same passages in blocks of `size`, wherever the files end, with `Columns("id", "title", "text")`."""
    first, waiting = 1, []
    last: Block | None = None
    for block in blocks:
        last = block
        for _, passage in parse_block(block, columns):
            waiting.append(passage)
            if len(waiting) == size:
                yield _block_of(waiting, block.path, first, block.position)
                first, waiting = first + size, []
    if waiting and last is not None:
        yield _block_of(waiting, last.path, first, last.position)


def _block_of(passages: Sequence[Passage], path: str, first: int, position: int) -> Block:
    rows = ({"id": p.passage_id, "title": p.title, "text": p.text} for p in passages)
    return Block(path, first, "lines", b"".join(json.dumps(row).encode() + b"\n" for row in rows), position, "passage")
