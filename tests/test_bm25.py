"""BM25: the words and scores of bm25s, answers that depend on the query alone."""

from __future__ import annotations

from pathlib import Path

import bm25s
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.retrieval import Hit, Passage, RetrievalFault
from data.retrieval.bm25 import Bm25Retriever, best_of
from data.retrieval.index.build import build_index_from
from data.retrieval.index.directory import IndexDirectory
from data.retrieval.index.passages import indexed_text
from data.retrieval.index.words import WordCounts, query_words
from schemas.errors import ArtifactError, ConfigError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
WORDY = st.lists(
    st.sampled_from(["aru", "Berg", "the", "of", "café", "a", "x1", "東京", "İstanbul", "K2", "e-mail", "_"]),
    max_size=15,
).map(" ".join)
ANY = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FEW = settings(ANY, max_examples=25)  # each builds an index, which waits for the disk
STOP_WORDS = list(bm25s.stopwords.STOPWORDS_EN)


def stock_words(texts: list[str]) -> list[list[str]]:
    return bm25s.tokenize(texts, return_ids=False, show_progress=False)


def passages_of(texts: list[str]) -> list[Passage]:
    return [Passage(str(number), "", text) for number, text in enumerate(texts)]


@given(st.one_of(TEXT, WORDY))
@ANY
def test_words_are_those_of_bm25s(text: str) -> None:
    assert query_words(text, STOP_WORDS) == stock_words([text])[0]


@given(st.lists(st.one_of(TEXT, WORDY), max_size=8))
@ANY
def test_counts_are_those_of_the_words_of_bm25s(texts: list[str]) -> None:
    expected = stock_words(texts) if texts else []
    counted = WordCounts(texts, STOP_WORDS)
    assert counted.words == sorted({word.encode() for words in expected for word in words})
    assert counted.lengths.tolist() == [len(words) for words in expected]
    for number, word in enumerate(counted.words):
        low, high = counted.starts[number : number + 2]
        found = dict(zip(counted.texts[low:high].tolist(), counted.counts[low:high].tolist(), strict=True))
        wanted = {place: words.count(word.decode()) for place, words in enumerate(expected)}
        assert found == {place: count for place, count in wanted.items() if count}
        assert counted.texts[low:high].tolist() == sorted(found)


@given(
    texts=st.lists(WORDY.map(lambda text: f"zulu {text}"), min_size=1, max_size=12),
    query=WORDY,
    k1=st.sampled_from([0.9, 1.5, 2.0]),
    b=st.sampled_from([0.0, 0.4, 0.75, 1.0]),
)
@FEW
def test_scores_equal_those_of_bm25s_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], query: str, k1: float, b: float
) -> None:
    rows = passages_of(texts)
    index = build_index_from(rows, tmp_path_factory.mktemp("bm25") / "out", k1=k1, b=b)
    stock = bm25s.BM25(k1=k1, b=b)
    stock.index(bm25s.tokenize([indexed_text(row) for row in rows], show_progress=False), show_progress=False)
    loaded = bm25s.BM25.load(str(index.path), mmap=True)
    words = [word for word in query_words(query, STOP_WORDS) if word in stock.vocab_dict]
    assert set(loaded.vocab_dict) == set(stock.vocab_dict)
    for query_list in (words, ["zulu", *words]):
        if query_list:
            assert loaded.get_scores(query_list).tolist() == stock.get_scores(query_list).tolist()


def test_the_files_are_what_bm25s_writes_itself(tmp_path: Path) -> None:
    rows = passages_of(["aru berg", "berg berg café", "delta"])
    index = build_index_from(rows, tmp_path / "ours")
    stock = bm25s.BM25()
    stock.index(bm25s.tokenize([row.text for row in rows], show_progress=False), show_progress=False)
    stock.save(str(tmp_path / "stock"), show_progress=False)
    for path in (tmp_path / "stock").iterdir():
        if path.suffix == ".npy":
            theirs, ours = np.load(path), np.load(index.path / path.name)
            assert ours.dtype == theirs.dtype
            assert len(ours) == len(theirs) + (
                1 if path.name.startswith("indptr") else 0
            )  # the column of the empty word
        assert (index.path / path.name).is_file()
    assert bm25s.BM25.load(str(index.path), mmap=True).get_scores([""]).tolist() == [0, 0, 0]


@given(
    texts=st.lists(WORDY.map(lambda text: f"zulu {text}"), min_size=1, max_size=12),
    query=WORDY,
    topk=st.integers(1, 15),
)
@FEW
def test_answers_are_the_best_by_score_and_then_by_place(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], query: str, topk: int
) -> None:
    rows = passages_of(texts)
    index = build_index_from(rows, tmp_path_factory.mktemp("bm25") / "out")
    retriever = Bm25Retriever(index)
    loaded = bm25s.BM25.load(str(index.path))
    words = [word for word in query_words(query, STOP_WORDS) if word in loaded.vocab_dict]
    scores = loaded.get_scores(words).tolist() if words else [0.0] * len(rows)
    expected = sorted((-score, number) for number, score in enumerate(scores) if score > 0)[:topk]
    alone = retriever.search([query], topk)[0]
    assert alone == [Hit(rows[number], -score) for score, number in expected]
    assert retriever.search(["zulu", query, "aru the", query], topk)[1::2] == [alone, alone]


def test_queries_without_a_known_word_find_nothing(tmp_path: Path) -> None:
    retriever = Bm25Retriever(build_index_from(passages_of(["aru berg"]), tmp_path / "out"))
    assert retriever.search(["", "the of a", "?!", "unknown", "x"], 3) == [[]] * 5
    assert retriever.search([], 3) == []
    assert retriever.search(["aru"], 0) == [[]]
    assert [hit.passage.passage_id for hit in retriever.search(["unknown aru"], 3)[0]] == ["0"]  # type: ignore[union-attr]


def test_the_title_is_searched_too(tmp_path: Path) -> None:
    rows = [Passage("1", "Mount Aru", "a high mountain"), Passage("2", "Berg", "a low one")]
    retriever = Bm25Retriever(build_index_from(rows, tmp_path / "out"))
    assert retriever.search(["mount ARU?"], 5)[0] == [Hit(rows[0], pytest.approx(retriever.best("aru mount", 1)[1][0]))]


def test_ties_go_to_the_passage_that_comes_first(tmp_path: Path) -> None:
    rows = passages_of(["aru berg"] * 50)
    retriever = Bm25Retriever(build_index_from(rows, tmp_path / "out"))
    for topk in (1, 3, 49, 50, 60):
        assert [hit.passage for hit in retriever.search(["berg"], topk)[0]] == rows[:topk]  # type: ignore[union-attr]


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=30), st.integers(1, 35))
def test_the_best_are_those_of_a_full_sort(scores: list[float], topk: int) -> None:
    numbers, found = best_of(np.array(scores, np.float32), topk)
    expected = sorted((-score, number) for number, score in enumerate(scores) if score > 0)[:topk]
    assert list(zip((-found).tolist(), numbers.tolist(), strict=True)) == expected


def test_identity_and_settings_are_those_of_the_index(tmp_path: Path) -> None:
    index = build_index_from(passages_of(["aru"]), tmp_path / "out", k1=0.9)
    retriever = Bm25Retriever(index)
    assert retriever.index_id() == index.index_id
    assert retriever.settings == {"kind": "bm25", "k1": 0.9, "b": 0.75, "method": "lucene"}


def test_an_index_that_is_replaced_is_never_half_the_old_one(tmp_path: Path) -> None:
    old, new = (
        [Passage(str(n), "", f"word{n} {name} {'filler ' * (n % 3)}") for n in range(50)] for name in ("old", "new")
    )
    opened = Bm25Retriever(build_index_from(old, tmp_path / "out"))
    late = IndexDirectory.open(tmp_path / "out")
    build_index_from(new, tmp_path / "out", force=True)
    [answer] = opened.search(["word7 old"], 1)
    assert not isinstance(answer, RetrievalFault) and answer[0].passage == old[7]
    with pytest.raises(ArtifactError, match="replaced while it was opened"):
        Bm25Retriever(late)


def test_another_kind_and_damaged_files_are_refused(tmp_path: Path) -> None:
    index = build_index_from(passages_of(["aru"]), tmp_path / "out")
    parameters = index.path / "params.index.json"
    parameters.write_text(" " * len(parameters.read_text()))
    with pytest.raises(ArtifactError, match="damaged"):
        Bm25Retriever(index)
    index.manifest.extra["settings"]["kind"] = "dense"
    with pytest.raises(ConfigError, match="expected bm25, found dense"):
        Bm25Retriever(index)


@pytest.mark.parametrize(
    ("name", "offset", "content"),
    [
        ("indices.csc.index.npy", -4, b"\xff\xff\xff\x7f"),  # a passage that is none
        ("indices.csc.index.npy", 11, b"("),  # a header that does not end
        ("passages.ends.npy", 11, b"("),
        ("passages.bin", -1, b"\xff"),
    ],
)
def test_damage_that_only_a_search_meets_is_said_too(tmp_path: Path, name: str, offset: int, content: bytes) -> None:
    path = build_index_from(passages_of(["aru", "berg"]), tmp_path / "out").path
    damaged = bytearray((path / name).read_bytes())
    start = offset % len(damaged)
    damaged[start : start + len(content)] = content
    (path / name).write_bytes(damaged)
    with pytest.raises(ArtifactError, match="damaged"):
        Bm25Retriever(IndexDirectory.open(path)).search(["berg"], 1)
