"""Building an index: bytes that depend on passages and settings alone, whatever was interrupted, and refusals that say why."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from data.retrieval import Passage
from data.retrieval.index import build, passages, postings, shards, sources, staged
from data.retrieval.index.build import build_index, build_index_from
from data.retrieval.index.corpus import Corpus
from data.retrieval.index.directory import IndexDirectory
from data.retrieval.index.passages import corpus_sha256
from data.retrieval.index.recipes import Bm25Recipe
from data.retrieval.index.sources import DEFAULT_COLUMNS, Columns
from schemas.errors import ArtifactError, ConfigError, LockError, RsipoError
from tests.kill_points import calls_until_end, killed_at

WORDS = ["aru", "berg", "café", "delta", "echo", "the", "of", "Fjord", "golf_1", "x", "東京", "hotel", "india"]


def some_passages(count: int = 40, seed: int = 0) -> list[Passage]:
    random = np.random.Generator(np.random.Philox(key=seed))
    return [
        Passage(f"p{number}", f"Title {number % 7}", " ".join(random.choice(WORDS, random.integers(1, 30)).tolist()))
        for number in range(count)
    ]


def write_corpus(path: Path, rows: Sequence[Passage]) -> Path:
    lines = (json.dumps({"id": p.passage_id, "title": p.title, "text": p.text}) + "\n" for p in rows)
    path.write_text("".join(lines))
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus.jsonl", some_passages())


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut corpora of a few kilobytes into several blocks."""
    monkeypatch.setattr(sources, "LEAST_BLOCK_BYTES", 700)
    monkeypatch.setattr(sources, "_READ_BYTES", 300)
    yield


def test_an_index_gives_back_its_passages_and_facts(corpus: Path, tmp_path: Path) -> None:
    index = build_index([corpus], tmp_path / "out")
    rows = some_passages()
    assert index.passages == len(rows)
    assert [index.passage(number) for number in range(len(rows))] == rows
    assert index.corpus_sha256 == corpus_sha256(rows)
    assert index.kind == "bm25"
    index.verify()
    for outside in (-1, len(rows)):
        with pytest.raises(IndexError):
            index.passage(outside)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "out"]


def test_bytes_do_not_depend_on_files_blocks_workers_or_ranges(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = some_passages()
    expected = contents(build_index([corpus], tmp_path / "whole").path)
    assert contents(build_index_from(rows, tmp_path / "memory").path) == expected
    monkeypatch.setattr(passages, "_BLOCK_PASSAGES", 7)
    assert contents(build_index_from(iter(rows), tmp_path / "parts").path) == expected
    halves = [write_corpus(tmp_path / "b", rows[:11]), write_corpus(tmp_path / "a", rows[11:])]
    assert contents(build_index(halves, tmp_path / "halves", workers=2).path) == expected
    monkeypatch.setattr(sources, "LEAST_BLOCK_BYTES", 500)
    monkeypatch.setattr(sources, "_READ_BYTES", 200)
    monkeypatch.setattr(postings.merge_postings, "__kwdefaults__", {"range_postings": 5})
    assert contents(build_index([corpus], tmp_path / "ranges", workers=1).path) == expected


def test_the_identity_follows_passages_and_settings(tmp_path: Path) -> None:
    rows = some_passages(5)
    renamed = [Passage("other", rows[0].title, rows[0].text), *rows[1:]]
    ids = {
        build_index_from(rows, tmp_path / "a").index_id,
        build_index_from(rows[::-1], tmp_path / "b").index_id,
        build_index_from(renamed, tmp_path / "c").index_id,
        build_index_from(rows, tmp_path / "d", k1=1.2).index_id,
        build_index_from(rows, tmp_path / "e", b=0.5).index_id,
    }
    assert len(ids) == 5
    assert build_index_from(rows, tmp_path / "f", k1=1.5, b=0.75).index_id in ids


def test_a_second_build_does_nothing(corpus: Path, tmp_path: Path) -> None:
    first = build_index([corpus], tmp_path / "out")
    before = {path: os.stat(path).st_mtime_ns for path in first.path.iterdir()}
    recipe = Bm25Recipe()
    for force in (False, True):
        index, state = build.ensure_index(Corpus.of_files([corpus], Columns()), tmp_path / "out", recipe, force=force)
        assert state == "up_to_date"
        assert index.index_id == first.index_id
    assert before == {path: os.stat(path).st_mtime_ns for path in first.path.iterdir()}


def test_another_corpus_or_setting_is_refused_until_forced(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build_index([corpus], out)
    with pytest.raises(ArtifactError, match="k1 .was 1.5, is 1.2.*--force"):
        build_index([corpus], out, k1=1.2)
    write_corpus(corpus, some_passages(41))
    with pytest.raises(ArtifactError, match="passages .were.*--force") as caught:
        build_index([corpus], out)
    assert caught.value.exit_code == 3
    index = build_index([corpus], out, k1=1.2, force=True)
    assert (index.passages, index.settings["k1"]) == (41, 1.2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "out"]


def test_a_directory_that_is_no_index_is_never_replaced(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("dear")
    (tmp_path / "file").write_text("dear")
    for out in (tmp_path / "mine", tmp_path / "file"):
        with pytest.raises(ArtifactError, match="something else"):
            build_index([corpus], out, force=True)
    assert (tmp_path / "mine" / "notes").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    assert build_index([corpus], tmp_path / "empty").passages == 40


def test_a_replacement_that_failed_gives_no_leave_to_remove_what_came_later(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    build_index([corpus], out, workers=1)

    def stop(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Bm25Recipe, "merge", stop)
        with pytest.raises(KeyboardInterrupt):
            build_index([corpus], out, workers=1, k1=1.0, force=True)
    (out / "manifest.json").unlink()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="something else"):
        build_index([corpus], out, workers=1, k1=1.0)
    (out / "thesis.txt").unlink()
    assert build_index([corpus], out, workers=1, k1=1.0).settings["k1"] == 1.0


def test_a_damaged_index_is_noticed_and_rebuilt_only_when_forced(corpus: Path, tmp_path: Path) -> None:
    index = build_index([corpus], tmp_path / "out")
    whole = contents(index.path)
    path = index.path / "passages.bin"
    path.write_bytes(b"?" + path.read_bytes()[1:])
    IndexDirectory.open(index.path)  # sizes are right
    with pytest.raises(ArtifactError, match="passages.bin.*--force"):
        index.verify()
    assert contents(build_index([corpus], tmp_path / "out", force=True).path) == whole
    path.write_bytes(b"short")
    with pytest.raises(ArtifactError, match="expected .* bytes, found 5 bytes"):
        build_index([corpus], tmp_path / "out")
    assert contents(build_index([corpus], tmp_path / "out", force=True).path) == whole


def test_opening_what_is_no_index_says_so(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ArtifactError, match="there is no index here"):
        IndexDirectory.open(tmp_path / "none")
    with pytest.raises(ArtifactError, match="unfinished"):
        IndexDirectory.open(tmp_path)
    index = build_index([corpus], tmp_path / "out")
    (index.path / "stray").write_text("")
    with pytest.raises(ArtifactError, match="stray"):
        IndexDirectory.open(index.path)


def test_finished_shards_are_taken_up_and_changed_ones_are_not(
    corpus: Path, tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = contents(build_index([corpus], tmp_path / "undisturbed", workers=1).path)
    made: list[str] = []
    write_shard, fail_after = shards.write_shard, 3

    def counted(path: Path, arrays: dict[str, np.ndarray]) -> None:
        if len(made) == fail_after:
            raise OSError(errno.ENOSPC, "No space left on device")
        made.append(path.name)
        write_shard(path, arrays)

    monkeypatch.setattr("data.retrieval.index.staged.write_shard", counted)
    with pytest.raises(RsipoError, match="disk is full"):
        build_index([corpus], tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()
    fail_after = 1000
    assert contents(build_index([corpus], tmp_path / "out", workers=1).path) == expected
    assert len(made) == len(set(made)) > 5  # none was made twice
    assert not (tmp_path / ".building-out").exists()


def test_a_full_disk_is_said_and_the_same_command_goes_on(
    corpus: Path, tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, fsync = 0, os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RsipoError, match="disk is full") as caught:
            build_index([corpus], tmp_path / "out", workers=1)
    assert caught.value.exit_code == 1
    assert not (tmp_path / "out").exists()
    assert build_index([corpus], tmp_path / "out", workers=1).passages == 40


def test_two_builds_of_one_index_do_not_meet(corpus: Path, tmp_path: Path) -> None:
    with shards.staging(tmp_path / "out"), pytest.raises(LockError) as caught:
        build_index([corpus], tmp_path / "out")
    assert caught.value.exit_code == 4
    build_index([corpus], tmp_path / "out")


def test_a_build_that_another_finished_meanwhile_is_not_built_over(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = build.staging

    def late(other: dict[str, float]) -> None:
        @contextlib.contextmanager
        def staging(out: Path) -> Iterator[Path]:
            monkeypatch.setattr(build, "staging", lock)
            build_index([corpus], out, workers=1, **other)
            with lock(out) as folder:
                yield folder

        monkeypatch.setattr(build, "staging", staging)

    late({})
    published: list[int] = []
    publish = build._publish
    monkeypatch.setattr(build, "_publish", lambda *args: (published.append(1), publish(*args))[1])
    recipe = Bm25Recipe()
    index, state = build.ensure_index(Corpus.of_files([corpus], DEFAULT_COLUMNS), tmp_path / "out", recipe, 1)
    assert (state, published) == ("up_to_date", [1])
    late({"k1": 1.0})
    with pytest.raises(ArtifactError, match="built from other input"):
        build_index([corpus], tmp_path / "third", workers=1)
    assert IndexDirectory.open(tmp_path / "third").settings["k1"] == 1.0
    assert not list(tmp_path.glob(".building-*"))


def test_a_build_killed_before_any_system_call_goes_on_to_the_same_bytes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LEAST_BLOCK_BYTES", 2500)
    monkeypatch.setattr(sources, "_READ_BYTES", 500)
    out = tmp_path / "out"
    expected = contents(build_index([corpus], tmp_path / "undisturbed", workers=1).path)
    build_index_from(some_passages(3), tmp_path / "old")

    def action() -> None:
        build_index([corpus], out, workers=1, force=True)

    def start(old: bool) -> None:
        shards.drop_staging(tmp_path / ".building-out")
        subprocess.run(["rm", "-rf", out], check=True)
        if old:
            subprocess.run(["cp", "-r", tmp_path / "old", out], check=True)

    for old, pace in ((False, 5), (True, 4)):
        start(old)
        calls = calls_until_end(action)
        for stop in range(1, calls + 1, pace):
            start(old)
            assert killed_at(stop, action)
            build_index([corpus], out, workers=1, force=True)
            assert contents(out) == expected, f"killed before call {stop} of {calls}"
            assert not (tmp_path / ".building-out").exists()
            assert not list(tmp_path.glob(".tmp-*"))


KILLED_SCRIPT = """
import sys
from data.retrieval.index import sources, build
sources.LEAST_BLOCK_BYTES, sources._READ_BYTES = 9000, 3000
if __name__ == "__main__":
    build.build_index([sys.argv[1]], sys.argv[2], workers=2)
"""


def test_killed_processes_with_workers_leave_a_build_that_goes_on_and_no_orphans(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", some_passages(800))
    expected = contents(build_index([corpus], tmp_path / "undisturbed", workers=1).path)
    script = tmp_path / "script.py"
    script.write_text(KILLED_SCRIPT)
    command = [sys.executable, str(script), str(corpus), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    staged = tmp_path / ".building-out"
    for wanted in (1, 5):  # shards on the disk when the kill comes
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        while len(list(staged.glob("shard-*"))) < wanted and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 60
        while _group_lives(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _group_lives(process.pid), "a worker outlived its parent"
    subprocess.run(command, env=environment, check=True)
    assert contents(tmp_path / "out") == expected
    assert not staged.exists()


def _group_lives(group: int) -> bool:
    """Whether a process of the group is neither gone nor a zombie."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                return True
    return False


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_fault_of_the_corpus_is_told_whoever_finds_one_first(
    tmp_path: Path, small_blocks: None, workers: int
) -> None:
    path = write_corpus(tmp_path / "corpus.jsonl", some_passages(60))
    lines = path.read_text().splitlines(keepends=True)
    lines[30] = '{"id": "bad"}\n'
    lines[32] = "not JSON\n"
    path.write_text("".join(lines))
    with pytest.raises(ArtifactError, match="no column text.*corpus.jsonl, line 31") as caught:
        build_index([path], tmp_path / "out", workers=workers)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out").exists()


def test_repeated_ids_are_told_with_both_places(tmp_path: Path, small_blocks: None) -> None:
    rows = some_passages(40)
    first = write_corpus(tmp_path / "a.jsonl", rows)
    second = write_corpus(tmp_path / "b.jsonl", [Passage("new", "", "t"), Passage("p33", "", "t")])
    with pytest.raises(ArtifactError, match="a.jsonl, line 34, and .*b.jsonl, line 2.*p33"):
        build_index([first, second], tmp_path / "out", workers=1)
    with pytest.raises(ArtifactError, match="passage 4, and .*passage 41"):
        build_index_from([*rows, rows[3]], tmp_path / "out")


def test_a_corpus_given_twice_is_refused_after_one_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    path = write_corpus(tmp_path / "a.jsonl", some_passages(60))
    reads: list[int] = []
    passage_id = staged.Staged.passage_id
    monkeypatch.setattr(
        staged.Staged, "passage_id", lambda self, number: reads.append(number) or passage_id(self, number)
    )
    with pytest.raises(ArtifactError, match="a.jsonl, line 1, and .*a.jsonl, line 1.*p0"):
        build_index([path, path], tmp_path / "out", workers=1)
    assert reads == [60, 0]


def test_equal_hashes_of_different_ids_are_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "id_hash", lambda passage_id: b"\0" * 8)
    rows = some_passages(10)
    assert build_index_from(rows, tmp_path / "out").passages == 10
    with pytest.raises(ArtifactError, match="passage 5, and .*passage 11"):
        build_index_from([*rows, rows[4]], tmp_path / "other")


def test_an_empty_corpus_and_one_without_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no passage"):
        build_index_from([], tmp_path / "out")
    with pytest.raises(ArtifactError, match="no passage of the corpus has a word"):
        build_index_from([Passage("1", "", "the of a !")], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "fuzzy"}, "bm25 or dense"),
        ({"k1": -1.0}, "k1"),
        ({"k1": float("nan")}, "k1"),
        ({"b": 1.5}, "0 to 1"),
        ({"pooling": "mean"}, "no such setting"),
        ({"workers": 0}, "workers"),
        ({"kind": "dense"}, "needs an embedding model"),
        ({"kind": "dense", "model": "m", "pooling": "max"}, "mean or cls"),
        ({"kind": "dense", "model": "m", "max_length": 1}, "2 or more"),
    ],
)
def test_wrong_settings_are_refused(corpus: Path, tmp_path: Path, settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_index([corpus], tmp_path / "out", **settings)  # type: ignore[arg-type]
    assert said in caught.value.sentence()
    assert caught.value.exit_code == 2
