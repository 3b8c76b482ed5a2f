"""The cache of queries: equal answers to those of the inner retriever, bounded, shared, and never the end of a run."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.retrieval import Answer, Hit, Passage, RetrievalFault, cache_file
from data.retrieval.cache import CachedRetriever
from data.retrieval.cache_file import CacheFile
from data.retrieval.cache_home import cache_home
from schemas.errors import ConfigError
from tests.retrieval_fakes import FakeRetriever, passages_for

ROOT = Path(__file__).resolve().parent.parent
IS_ROOT = os.geteuid() == 0


def cached(path: Path, inner: FakeRetriever | None = None, **options: object) -> tuple[CachedRetriever, list[str]]:
    notes: list[str] = []
    return CachedRetriever(inner or FakeRetriever(), path, note=notes.append, **options), notes  # type: ignore[arg-type]


# --- answers


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    calls=st.lists(
        st.tuples(st.lists(st.sampled_from(["a", "b", "c", "bad", "ä\u2028\ud800"]), max_size=6), st.integers(1, 3))
    ),
)
def test_answers_and_their_order_are_those_of_the_inner_retriever(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[list[str], int]]
) -> None:
    inner, plain = FakeRetriever(broken=["bad"]), FakeRetriever(broken=["bad"])
    retriever, notes = cached(tmp_path_factory.mktemp("cache") / "q.sqlite", inner)
    for queries, topk in calls:
        got, expected = retriever.search(queries, topk), plain.search(queries, topk)
        assert [str(answer) for answer in got] == [str(answer) for answer in expected]
    assert retriever.hits + retriever.misses == sum(len(queries) for queries, _ in calls) and not notes
    retriever.close()


def test_what_was_retrieved_once_is_not_retrieved_again_even_by_another_process(tmp_path: Path) -> None:
    inner = FakeRetriever()
    retriever, _ = cached(tmp_path / "q.sqlite", inner)
    assert retriever.search(["a", "b", "a"], 2) == [passages_for(query, 2) for query in "aba"]
    assert (retriever.hits, retriever.misses) == (0, 3) and inner.asked == ["a", "b"]
    retriever.close()
    again, _ = cached(tmp_path / "q.sqlite", inner)
    assert again.search(["b", "a", "c"], 2) == [passages_for(query, 2) for query in "bac"]
    assert (again.hits, again.misses) == (2, 1) and inner.asked == ["a", "b", "c"]


def test_another_number_of_passages_index_or_setting_is_another_answer(tmp_path: Path) -> None:
    class Other(FakeRetriever):
        settings = {"kind": "fake", "b": 0.5}  # type: ignore[assignment]

    inners = [FakeRetriever(), FakeRetriever("f" * 64), Other()]
    for inner in inners:
        retriever, _ = cached(tmp_path / "q.sqlite", inner)
        for topk in (1, 2):
            assert retriever.search(["a"], topk) == [passages_for("a", topk)]
    assert [inner.asked for inner in inners] == [["a", "a"]] * 3


def test_faults_are_never_kept(tmp_path: Path) -> None:
    inner = FakeRetriever(broken=["a"])
    retriever, _ = cached(tmp_path / "q.sqlite", inner)
    assert isinstance(retriever.search(["a"], 1)[0], RetrievalFault)
    inner.broken = []
    assert retriever.search(["a"], 1) == [passages_for("a", 1)] == retriever.search(["a"], 1)
    assert inner.asked == ["a", "a"] and (retriever.hits, retriever.misses) == (1, 2)


def test_an_answer_may_be_changed_by_its_receiver_without_harm(tmp_path: Path) -> None:
    retriever, _ = cached(tmp_path / "q.sqlite")
    first, second = retriever.search(["a", "a"], 2)
    first.clear()  # type: ignore[union-attr]
    assert second == retriever.search(["a"], 2)[0] == passages_for("a", 2)


# --- which index


def test_an_index_that_nobody_names_cannot_be_cached(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.options\.retriever\.index.*name"):
        cached(tmp_path / "q.sqlite", FakeRetriever("unnamed"))


@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_a_cache_without_room_is_a_configuration_error(tmp_path: Path, size: float) -> None:
    with pytest.raises(ConfigError, match="max_megabytes"):
        cached(tmp_path / "q.sqlite", max_megabytes=size)


def test_a_server_that_is_down_at_the_start_is_cached_once_it_answers(tmp_path: Path) -> None:
    class Late(FakeRetriever):
        up = False

        def index_id(self) -> str:
            if not self.up:
                raise RetrievalFault("down")
            return self.index

        def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
            return super().search(queries, topk) if self.up else [RetrievalFault("down") for _ in queries]

    inner = Late()
    retriever, notes = cached(tmp_path / "q.sqlite", inner)
    assert isinstance(retriever.search(["a"], 1)[0], RetrievalFault)
    inner.up = True
    assert retriever.search(["a"], 1) == retriever.search(["a"], 1) == [passages_for("a", 1)]
    assert (retriever.hits, retriever.misses) == (1, 1) and not notes


# --- the bound


class Wordy(FakeRetriever):
    """About 10 kB an answer."""

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        self.asked.extend(queries)
        return [[Hit(Passage(query, "", query + "x" * 10_000), 1.0)] for query in queries]


def test_the_file_stays_within_its_bound_and_forgets_what_was_not_used_longest(tmp_path: Path) -> None:
    inner = Wordy()
    retriever, _ = cached(tmp_path / "q.sqlite", inner, max_megabytes=1)
    for number in range(300):
        retriever.search([str(number), "kept"], 1)  # `kept` is as old as the oldest, and used all the time
    retriever.close()
    assert retriever.evictions > 200
    assert (tmp_path / "q.sqlite").stat().st_size < 1_200_000
    inner.asked.clear()
    again, _ = cached(tmp_path / "q.sqlite", inner, max_megabytes=1)
    again.search(["kept", "299", "298"], 1)
    assert inner.asked == []
    again.search(["0", "1"], 1)
    assert inner.asked == ["0", "1"]


def test_an_answer_larger_than_the_whole_cache_is_not_kept_and_displaces_nothing(tmp_path: Path) -> None:
    class Huge(Wordy):
        def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
            self.asked.extend(queries)
            return [[Hit(Passage("0", "", "x" * (200_000 if query == "huge" else 10)), 1.0)] for query in queries]

    inner = Huge()
    retriever, _ = cached(tmp_path / "q.sqlite", inner, max_megabytes=0.1)
    for query in ("a", "huge", "a", "huge"):
        retriever.search([query], 1)
    assert inner.asked == ["a", "huge", "huge"] and retriever.evictions == 0


def test_answers_without_passages_take_room_too(tmp_path: Path) -> None:
    class Empty(FakeRetriever):
        def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
            return [[] for _ in queries]

    retriever, _ = cached(tmp_path / "q.sqlite", Empty(), max_megabytes=1)
    for start in range(0, 30_000, 3000):
        retriever.search([str(number) for number in range(start, start + 3000)], 1)
    retriever.close()
    assert retriever.evictions > 10_000
    assert 500_000 < (tmp_path / "q.sqlite").stat().st_size < 1_200_000


def test_a_smaller_limit_shrinks_the_file(tmp_path: Path) -> None:
    retriever, _ = cached(tmp_path / "q.sqlite", Wordy(), max_megabytes=10)
    retriever.search([str(number) for number in range(300)], 1)
    retriever.close()
    before = (tmp_path / "q.sqlite").stat().st_size
    smaller, _ = cached(tmp_path / "q.sqlite", Wordy(), max_megabytes=1)
    smaller.search(["new"], 1)
    smaller.close()
    assert before > 2_000_000 and (tmp_path / "q.sqlite").stat().st_size < 1_000_000


# --- several processes


def test_a_file_that_another_process_makes_just_now_is_not_foreign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_file, "BUSY_SECONDS", 0.0)
    path = tmp_path / "q.sqlite"
    notes: list[str] = []
    other = CacheFile(path, 10**6, notes.append)

    class Interrupted(sqlite3.Connection):
        def execute(self, sql: str, *arguments: object) -> Any:
            if sql != "PRAGMA application_id":
                return super().execute(sql, *arguments)  # type: ignore[arg-type]
            [row] = super().execute(sql).fetchall()
            other.store({b"key": b"value"})
            return super().execute("SELECT ?", row)

    connection = sqlite3.connect(path, 0, isolation_level=None, factory=Interrupted)
    cache_file._prepare(connection)
    assert connection.execute("SELECT count(*) FROM counters").fetchone() == (2,) and not notes
    connection.close()


@pytest.mark.parametrize("code", [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_PROTOCOL])
def test_processes_in_each_others_way_are_no_damage(tmp_path: Path, code: int) -> None:
    notes: list[str] = []
    file = CacheFile(tmp_path / "q.sqlite", 10**6, notes.append)
    file.store({b"key": b"value"})

    def fail(value: bytes) -> bytes:
        error = sqlite3.OperationalError("locking protocol")
        error.sqlite_errorcode = code
        raise error

    assert file.look_up([b"key"], fail) == {}
    assert file.look_up([b"key"], bytes) == {b"key": b"value"} and not notes


def test_what_stops_a_write_leaves_no_transaction_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    file = CacheFile(tmp_path / "q.sqlite", 10**6, notes.append)
    file.store({b"before": b"value"})

    def stop(*arguments: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache_file, "_counter", stop)
        with pytest.raises(KeyboardInterrupt):
            file.store({b"key": b"value"})
    file.store({b"after": b"value"})
    assert set(file.look_up([b"before", b"key", b"after"], bytes)) == {b"before", b"after"} and not notes


def _fill(path: str, start: int, results: multiprocessing.Queue) -> None:
    notes: list[str] = []
    retriever = CachedRetriever(FakeRetriever(), path, note=notes.append)
    queries = [str(number) for number in range(start, start + 60)]
    right = all(retriever.search([query], 2) == [passages_for(query, 2)] for query in queries)
    retriever.close()
    results.put((right, notes))


def test_processes_fill_one_file_together(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue = context.Queue()
    workers = [
        context.Process(target=_fill, args=(str(tmp_path / "q.sqlite"), start, results)) for start in (0, 30, 60)
    ]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=60) for _ in workers] == [(True, [])] * 3
    for worker in workers:
        worker.join()
    inner = FakeRetriever()
    retriever, _ = cached(tmp_path / "q.sqlite", inner)
    retriever.search([str(number) for number in range(120)], 2)
    assert inner.asked == [] and retriever.hits == 120


def test_a_forked_child_opens_the_file_for_itself(tmp_path: Path) -> None:
    code = """
import os, sys
from data.retrieval.cache import CachedRetriever
from tests.retrieval_fakes import FakeRetriever
inner = FakeRetriever()
retriever = CachedRetriever(inner, sys.argv[1])
retriever.search(["a"], 1)
child = os.fork()
retriever.search(["a", "child" if child == 0 else "parent"], 1)
retriever.close()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
again = CachedRetriever(inner, sys.argv[1])
again.search(["a", "child", "parent"], 1)
print(again.hits)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "q.sqlite")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("3\n", "")


# --- what a run survives


def test_a_damaged_file_is_set_aside_with_one_note_and_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "q.sqlite"
    path.write_bytes(b"this is no database, but somebody's notes\n" * 200)
    retriever, notes = cached(path)
    for _ in range(3):
        assert retriever.search(["a"], 1) == [passages_for("a", 1)]
    assert retriever.hits == 2
    assert len(notes) == 1 and "begins anew" in notes[0] and str(path) in notes[0]
    assert (tmp_path / "q.sqlite.damaged").read_bytes().startswith(b"this is no database")


def test_pages_overwritten_in_the_middle_are_noticed_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "q.sqlite"
    queries = [str(number) for number in range(200)]
    retriever, _ = cached(path)
    retriever.search(queries, 3)
    retriever.close()
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(os.urandom(20_000))
    retriever, notes = cached(path)
    for _ in range(2):
        assert retriever.search(queries, 3) == [passages_for(query, 3) for query in queries]
    assert len(notes) == 1


def test_an_entry_changed_by_one_letter_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "q.sqlite"
    retriever, _ = cached(path)
    retriever.search(["a"], 1)
    retriever.close()
    with sqlite3.connect(path) as connection:
        (value,) = connection.execute("SELECT value FROM entries").fetchone()
        connection.execute("UPDATE entries SET value = ?", (value.replace(b"text", b"next"),))
    connection.close()
    retriever, notes = cached(path)
    assert retriever.search(["a"], 1) == [passages_for("a", 1)] and len(notes) == 1


def test_the_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE precious (x)")
    connection.close()
    before = path.read_bytes()
    retriever, notes = cached(path)
    for _ in range(2):
        assert retriever.search(["a"], 1) == [passages_for("a", 1)]
    assert path.read_bytes() == before and len(notes) == 1 and "another program" in notes[0]


def test_a_file_of_another_version_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "q.sqlite"
    retriever, _ = cached(path)
    retriever.search(["a"], 1)
    retriever.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    retriever, notes = cached(path)
    assert retriever.search(["a"], 1) == retriever.search(["a"], 1) == [passages_for("a", 1)]
    assert len(notes) == 1 and "99" in notes[0] and retriever.hits == 1


@pytest.mark.parametrize("obstacle", ["a directory in the place of the file", "a file in the place of the directory"])
def test_a_place_that_cannot_be_used_means_no_cache_and_one_note(tmp_path: Path, obstacle: str) -> None:
    path = tmp_path / "place" / "q.sqlite"
    if obstacle.startswith("a directory"):
        path.mkdir(parents=True)
    else:
        path.parent.write_text("x")
    inner = FakeRetriever()
    retriever, notes = cached(path, inner)
    for _ in range(3):
        assert retriever.search(["a"], 1) == [passages_for("a", 1)]
    assert len(notes) == 1 and "left out" in notes[0] and inner.asked == ["a"] * 3 and retriever.misses == 3


@pytest.mark.skipif(IS_ROOT, reason="root may write everywhere")
def test_a_directory_that_is_read_only_means_no_cache(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    retriever, notes = cached(tmp_path / "q.sqlite")
    assert retriever.search(["a"], 1) == [passages_for("a", 1)] and len(notes) == 1
    tmp_path.chmod(0o700)


def test_a_full_disk_means_no_further_entries_and_one_note(tmp_path: Path) -> None:
    inner = Wordy()
    retriever, notes = cached(tmp_path / "q.sqlite", inner)
    retriever.search(["a"], 1)
    connection = retriever._file._connection
    assert connection is not None
    connection.execute("PRAGMA max_page_count = 1")  # SQLite answers SQLITE_FULL, as it does for ENOSPC
    for number in range(5):
        assert len(retriever.search([str(number)], 1)[0]) == 1  # type: ignore[arg-type]
    assert len(notes) == 1 and "full" in notes[0]


def test_a_file_that_another_process_holds_means_an_uncached_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.retrieval.cache_file.BUSY_SECONDS", 0.0)
    path = tmp_path / "q.sqlite"
    inner = FakeRetriever()
    retriever, notes = cached(path, inner)
    retriever.search(["a"], 1)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert retriever.search(["a", "b"], 1) == [passages_for("a", 1), passages_for("b", 1)]
    other.execute("ROLLBACK")
    other.close()
    assert retriever.search(["b"], 1) == retriever.search(["b"], 1) == [passages_for("b", 1)]
    assert inner.asked == ["a", "b", "b"] and not notes


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RSIPO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME, for a number that no user has
    with pytest.raises(ConfigError, match="RSIPO_CACHE"):
        cache_home()


def test_where_the_cache_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RSIPO_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_home() == tmp_path / ".cache" / "rsipo"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_home() == tmp_path / ".cache" / "rsipo"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_home() == tmp_path / "xdg" / "rsipo"
    monkeypatch.setenv("RSIPO_CACHE", "~/own")
    assert cache_home() == tmp_path / "own"
