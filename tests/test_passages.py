"""Reading a corpus: every format gives the same passages, every fault its file and line."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.retrieval import Passage
from data.retrieval.index import sources
from data.retrieval.index.passages import blocks_of, corpus_sha256, parse_block, read_passages
from data.retrieval.index.sources import Columns, read_blocks
from schemas.errors import ArtifactError, ConfigError

PASSAGES = [
    Passage("0", "Mount Aru", "A mountain in the north.\nIt is high."),
    Passage("b", "", "Ein Berg — ohne Titel."),
    Passage("7", 'The "Blue" House', "A house."),
]


def lines_of(passages: Sequence[Passage]) -> bytes:
    rows = ({"id": p.passage_id, "title": p.title, "text": p.text} for p in passages)
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def contents_of(passages: Sequence[Passage]) -> bytes:
    rows = ({"id": p.passage_id, "contents": f'"{p.title}"\n{p.text}'} for p in passages)
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_parquet(path: Path, passages: Sequence[Passage], **names: str) -> Path:
    columns = {
        names.get("id", "id"): [p.passage_id for p in passages],
        names.get("title", "title"): [p.title for p in passages],
        names.get("text", "text"): [p.text for p in passages],
    }
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_every_format_gives_the_same_passages(tmp_path: Path) -> None:
    plain = lines_of(PASSAGES)
    files = [
        write(tmp_path / "a.jsonl", plain),
        write(tmp_path / "contents.jsonl", contents_of(PASSAGES)),
        write(tmp_path / "a.jsonl.gz", gzip.compress(plain)),
        write(tmp_path / "two-members", gzip.compress(plain[:50]) + gzip.compress(plain[50:])),
        write(tmp_path / "a.jsonl.xz", lzma.compress(plain)),
        write(tmp_path / "windows.jsonl", b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n") + b"\r\n  \n"),
        write(tmp_path / "no-last-line-feed", plain[:-1]),
        write_parquet(tmp_path / "a.parquet", PASSAGES),
    ]
    for path in files:
        assert list(read_passages([path])) == PASSAGES, path.name


def test_several_files_are_one_corpus_in_their_order(tmp_path: Path) -> None:
    first = write(tmp_path / "z", lines_of(PASSAGES[:1]))
    second = write_parquet(tmp_path / "a", PASSAGES[1:])
    assert list(read_passages([first, second])) == PASSAGES


def test_columns_are_mapped(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b'{"key": 12, "head": "T", "body": "text", "id": "x", "contents": "other"}\n')
    assert list(read_passages([path], Columns("key", "head", "body"))) == [Passage("12", "T", "text")]
    parquet = write_parquet(tmp_path / "b", PASSAGES, id="key", title="head", text="body")
    assert list(read_passages([parquet], Columns("key", "head", "body"))) == PASSAGES


def test_one_line_of_contents_is_a_text_without_title(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b'{"id": "1", "contents": "just text"}\n{"id": "2", "contents": "\\"T\\"\\n"}\n')
    assert list(read_passages([path])) == [Passage("1", "", "just text"), Passage("2", "", '"T"\n')]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{not json", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"id": "x", "text": "cut', "not JSON"),
        (b"[1, 2]", "JSON object"),
        (b'"text"', "JSON object"),
        (b'{"text": "t"}', "no column id"),
        (b'{"id": "x"}', "no column text"),
        (b'{"id": "x", "body": "t"}', "--text-column"),
        (b'{"id": "", "text": "t"}', "no id"),
        (b'{"id": null, "text": "t"}', "no id"),
        (b'{"id": true, "text": "t"}', "no id"),
        (b'{"id": "x", "text": ""}', "no text"),
        (b'{"id": "x", "text": " \\n "}', "no text"),
        (b'{"id": "x", "text": 3}', "no text"),
        (b'{"id": "x", "contents": null}', "no text in column contents"),
        (b'{"id": "x", "title": [], "text": "t"}', "title"),
        (b'{"id": "x", "text": "\\ud800"}', "surrogate"),
    ],
)
def test_a_bad_record_is_refused_with_its_file_and_line(tmp_path: Path, line: bytes, said: str) -> None:
    path = write(tmp_path / "corpus.jsonl", lines_of(PASSAGES[:1]) + b"\n" + line + b"\n" + lines_of(PASSAGES[1:]))
    with pytest.raises(ArtifactError, match="corpus.jsonl, line 3") as caught:
        list(read_passages([path]))
    assert said in caught.value.sentence()
    assert caught.value.exit_code == 3


def test_a_bad_row_of_parquet_is_refused_with_its_row(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [*PASSAGES, Passage("9", "T", "")])
    with pytest.raises(ArtifactError, match="a.parquet, row 4"):
        list(read_passages([path]))


def test_a_parquet_file_without_the_columns_says_which_it_has(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", PASSAGES, text="body")
    with pytest.raises(ArtifactError, match="no column text.*found id, title, body.*--text-column"):
        list(read_passages([path]))


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_a_truncated_compressed_file_is_named(tmp_path: Path, compress: object) -> None:
    many = lines_of([Passage(str(number), "", f"text {number * 7919 % 1000}") for number in range(2000)])
    whole = compress(many)  # type: ignore[operator]
    for content in (whole[:-8], whole[: len(whole) // 2], whole[:40] + b"\0" * 40 + whole[80:]):
        path = write(tmp_path / "cut", content)
        with pytest.raises(ArtifactError, match="truncated or damaged.*cut, after line") as caught:
            list(read_passages([path]))
        assert caught.value.exit_code == 3


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    content = write_parquet(tmp_path / "a", PASSAGES).read_bytes()
    path = write(tmp_path / "cut.parquet", content[: len(content) // 2])
    with pytest.raises(ArtifactError, match="cut.parquet"):
        list(read_passages([path]))


def test_a_row_of_parquet_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    content = pa.array([b"fine", b"fine too", b"\xff\xfe"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, content.buffers())
    pq.write_table(pa.table({"id": ["a", "b", "c"], "text": texts}), tmp_path / "a.parquet")
    with pytest.raises(ArtifactError, match="UTF-8.*a.parquet, row 3"):
        list(read_passages([tmp_path / "a.parquet"]))


def test_long_rows_of_parquet_come_in_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Passage(str(number), "", f"{number} " + chr(97 + number % 26) * (number * 37 % 4000)) for number in range(200)
    ]
    path = write_parquet(tmp_path / "a.parquet", rows)
    [whole] = sources.read_blocks([path], 0, Columns())
    monkeypatch.setattr(sources, "MOST_BLOCK_BYTES", 20_000)
    blocks = list(sources.read_blocks([path], 0, Columns()))
    assert max(len(block.content) for block in blocks) < 60_000 < len(whole.content)
    assert list(read_passages([path])) == rows


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(sources, "LONGEST_RECORD_BYTES", 5 << 20)
    line = b'{"id": "9", "text": "' + b"a" * (4 << 20) + b'"}\n'
    path = write(tmp_path / "a.jsonl", compress(lines_of(PASSAGES) + line))
    assert len(list(read_passages([path]))) == len(PASSAGES) + 1
    path = write(tmp_path / "b.jsonl", compress(lines_of(PASSAGES) + line[:-1] * 2))
    with pytest.raises(ArtifactError, match=f"too long.*b.jsonl, line {len(PASSAGES) + 1}"):
        list(read_passages([path]))


def test_a_corpus_without_passages_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"\n \n", gzip.compress(b"")):
        with pytest.raises(ArtifactError, match="no passage.*empty"):
            list(read_passages([write(tmp_path / "empty", content)]))


def test_paths_that_are_no_files_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ArtifactError, match="cannot be read"):
            list(read_passages([path]))
    with pytest.raises(ConfigError):
        list(read_passages([]))


def test_an_id_that_comes_twice_is_refused_with_both_places(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", lines_of(PASSAGES))
    second = write_parquet(tmp_path / "b.parquet", [Passage("x", "", "t"), Passage("7", "", "other")])
    with pytest.raises(ArtifactError, match="a.jsonl, line 3, and .*b.parquet, row 2.*7") as caught:
        list(read_passages([first, second]))
    assert caught.value.exit_code == 3
    assert len(list(read_passages([first, second], unique=False))) == 5


def test_ids_whose_hashes_are_equal_are_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.retrieval.index.passages.id_hash", lambda passage_id: b"\0" * 8)
    path = write(tmp_path / "a.jsonl", lines_of(PASSAGES))
    assert list(read_passages([path])) == PASSAGES
    path.write_bytes(lines_of([*PASSAGES, PASSAGES[1]]))
    with pytest.raises(ArtifactError, match="line 2, and .*line 4"):
        list(read_passages([path]))


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "grows.jsonl", lines_of(PASSAGES))
    blocks = read_blocks([path], 10, Columns())
    next(blocks)
    path.write_bytes(lines_of([*PASSAGES, Passage("new", "", "t")]))
    with pytest.raises(ArtifactError, match="changed while.*grows.jsonl"):
        list(blocks)


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30), min_size=1, max_size=12),
    size=st.integers(1, 200),
    piece=st.integers(1, 64),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blocks_of_any_size_hold_the_same_passages_with_the_same_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str], size: int, piece: int
) -> None:
    passages = [Passage(str(number), "", f"x{text}") for number, text in enumerate(texts)]
    path = write(tmp_path / "a", lines_of(passages))
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_READ_BYTES", piece)
        blocks = list(read_blocks([path], size, Columns()))
    found = [pair for block in blocks for pair in parse_block(block, Columns())]
    assert found == list(enumerate(passages, 1))


def test_the_hash_of_a_corpus_is_that_of_its_passages_in_order() -> None:
    whole = corpus_sha256(PASSAGES)
    assert whole == corpus_sha256(iter(PASSAGES))
    again = [passage for block in blocks_of(PASSAGES) for _, passage in parse_block(block, Columns())]
    assert corpus_sha256(again) == whole
    moved = [Passage("0", "Mount ", "Aru" + PASSAGES[0].text), *PASSAGES[1:]]
    others = [PASSAGES[::-1], PASSAGES[:2], moved, [Passage("00", p.title, p.text) for p in PASSAGES]]
    assert len({whole, *map(corpus_sha256, others)}) == 5
