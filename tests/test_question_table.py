"""The question table: round trips, equal bytes, and one sentence for every table that is not what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.search.question_table import SCHEMA, read_questions, write_questions
from data.tasks import Task
from schemas.errors import ArtifactError, ConfigError

TASKS = [
    Task("nq/dev/1", "nq", "dev", "Who wrote it?", {"answers": ["Ada Lund", "A. Lund"]}, {"hops": "1"}),
    Task("mine/dev/2", "mine", "dev", "Åse, 李?", {"answers": ["ja"], "corpus": "c" * 64}),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_questions(TASKS, tmp_path / "questions.parquet")
    return tmp_path / "questions.parquet"


def test_every_field_of_a_question_survives_the_round_trip(path: Path) -> None:
    found = {task.task_id: task for task in read_questions(path)}
    assert found == {task.task_id: task for task in TASKS}
    assert {name: task.sha256 for name, task in found.items()} == {task.task_id: task.sha256 for task in TASKS}


def test_the_order_of_the_tasks_does_not_change_the_bytes_and_nothing_else_is_left(path: Path, tmp_path: Path) -> None:
    write_questions(TASKS[::-1], tmp_path / "again" / "questions.parquet")
    assert (tmp_path / "again" / "questions.parquet").read_bytes() == path.read_bytes()
    assert [entry.name for entry in (tmp_path / "again").iterdir()] == ["questions.parquet"]


texts = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=12)  # visible characters


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(texts, st.tuples(texts, st.lists(texts, max_size=3), st.none() | st.just("2")), min_size=1))
def test_any_questions_come_back_with_their_hashes(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, tuple[str, list[str], str | None]]
) -> None:
    tasks = [
        Task(
            f"set/dev/{name}",
            "set",
            "dev",
            text,
            {"answers": ["gold", *answers]},
            {} if hops is None else {"hops": hops},
        )
        for name, (text, answers, hops) in content.items()
    ]
    path = tmp_path_factory.mktemp("table") / "t.parquet"
    write_questions(tasks, path)
    assert sorted(read_questions(path), key=lambda task: task.task_id) == sorted(tasks, key=lambda task: task.task_id)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({}, "found nothing"),
        ({"answers": []}, "is no question"),
        ({"answers": "x"}, "is no question"),
        ({"answers": ["x"], "scene": 3}, "found answers, scene"),
    ],
)
def test_a_task_that_is_no_question_is_not_written(tmp_path: Path, payload: dict[str, object], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        write_questions([Task("a", "nq", "dev", "q", payload)], tmp_path / "t.parquet")
    assert not list(tmp_path.iterdir())


def test_no_task_and_a_repeated_id_are_refused(tmp_path: Path) -> None:
    for tasks in ([], [TASKS[0], TASKS[0]]):
        with pytest.raises(ConfigError):
            write_questions(tasks, tmp_path / "t.parquet")


def test_a_table_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="file"):
        write_questions(TASKS, tmp_path / "file" / "t.parquet")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def rewrite(path: Path, change: Callable[[list[dict[str, object]]], object]) -> None:
    """Change the rows of a table and write it with the same schema."""
    rows = pq.read_table(path).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[1].update(question="Who else?"), "row 2, column sha256.*not the one its hash names"),
        (lambda rows: rows[0].update(answers=["x"]), "row 1, column sha256"),
        (lambda rows: rows[0].update(question=" "), "row 1, column question.*no text"),
        (lambda rows: rows[0].update(answers=["the"]), "row 1, column answers.*no gold answer"),
        (lambda rows: rows.append(rows[0]), "row 3.*twice"),
        (lambda rows: rows.clear(), "holds no question"),
    ],
)
def test_a_row_that_was_changed_by_hand_is_named(
    path: Path, change: Callable[[list[dict[str, object]]], object], message: str
) -> None:
    rewrite(path, change)
    with pytest.raises(ArtifactError) as caught:
        read_questions(path)
    sentence = str(caught.value)
    assert all(part in " ".join((sentence, sentence)) for part in (str(path), "rsipo tasks build"))
    assert caught.value.exit_code == 3
    parts = message.split(".*")
    assert all(part in sentence for part in parts), sentence


def other_table(path: Path) -> None:
    pq.write_table(pa.table({"question": ["q"], "answer": ["a"]}), path)


def other_version(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"rsipo.table": "questions", "rsipo.version": "9"}), path)


def missing_column(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns(["hops"]), path)


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_table, "no question table.*found question, answer"),
        (other_version, "expected version 1 with .*, found version 9"),
        (missing_column, "another schema"),
        (damaged, "cannot be read"),
        (Path.unlink, "no such question table"),
    ],
)
def test_a_file_that_is_no_table_of_this_release_is_one_sentence(
    path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(path)
    with pytest.raises(ArtifactError, match=message) as caught:
        read_questions(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_changed_byte_is_found_or_changes_no_question(path: Path) -> None:
    content, found = path.read_bytes(), read_questions(path)
    refused = 0
    for place in range(0, len(content), 11):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            assert read_questions(path) == found
        except ArtifactError:
            refused += 1
    assert refused > len(content) // 22
