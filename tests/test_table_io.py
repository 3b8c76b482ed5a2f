"""Tables go to disk whole, come back equal, and say so when they are damaged, stale or of another version."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import table_io
from schemas.artifacts import MANIFEST
from schemas.config import Config
from schemas.errors import ArtifactError, NumericsError, RsipoError
from schemas.run_directory import RunDirectory
from schemas.table_io import (
    arrow_table,
    clear_step,
    finish_step,
    parts_done,
    read_parts,
    read_table,
    stage_status,
    write_loose_part,
    write_part,
)
from schemas.tables import SCHEMAS
from stages.stage import Stopwatch, open_stage
from tests.kill_points import calls_until_end, killed_at

TABLES = ("rollout_turns", "rollouts")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", Config())


def _episode(number: int, step: int = 1, **changes: Any) -> dict[str, Any]:
    row = {
        "step": step,
        "episode_id": f"e{number}",
        "task_id": f"t{number // 2}",
        "task_type": "heat",
        "task_sha256": "0" * 64,
        "index": number % 2,
        "skill_id": None,
        "seed": 2**62 + number,
        "fingerprint": "f",
        "won": None if number == 3 else bool(number % 2),
        "score": None,
        "turns": 3,
        "invalid_turns": 0,
        "sampled_tokens": 5,
        "stop_reason": "done",
        "error": None,
        "weights_sha256": "w",
    }
    return _complete("rollouts", row) | changes


def _turn(number: int, step: int = 1, **changes: Any) -> dict[str, Any]:
    row = {
        "step": step,
        "episode_id": f"e{number}",
        "task_id": f"t{number // 2}",
        "turn": 0,
        "observation": "You are in a room.\n\x1b[31m",
        "admissible_commands": ["look", "inventory"],
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [7, 8],
        "behaviour_logprobs": [-0.5, -1.25],
        "temperature": 1.0,
        "text": "<think>é</think>",
        "action": None,
        "valid": False,
        "invalid_reason": "no action",
        "stop_reason": "eos",
        "seed": 5,
    }
    return _complete("rollout_turns", row) | changes


def _complete(table: str, row: dict[str, Any]) -> dict[str, Any]:
    return {name: row.get(name) for name in SCHEMAS[table].names}


def _rows(part: int, step: int = 1) -> dict[str, list[dict[str, Any]]]:
    numbers = range(4 * part, 4 * part + 4)
    return {"rollout_turns": [_turn(n, step) for n in numbers], "rollouts": [_episode(n, step) for n in numbers]}


def _finished(run: RunDirectory, step: int = 1) -> None:
    for part in range(2):
        write_part(run, step, part, _rows(part, step), "inputs")
    finish_step(run, TABLES, step, kind="rollout", inputs={"weights": "w"}, extra={"tasks": 2})


def _types(field_type: pa.DataType) -> list[pa.DataType]:
    inner = [field_type.field(i).type for i in range(field_type.num_fields)]
    return [field_type, *(deep for kind in inner for deep in _types(kind))]


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_no_column_has_32_bit_offsets(name: str) -> None:
    for field in SCHEMAS[name]:
        for kind in _types(field.type):
            assert not (pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_list(kind)), field


def test_a_finished_step_reads_back_as_it_was_written_in_the_order_of_its_parts(run: RunDirectory) -> None:
    write_part(run, 1, 1, _rows(1), "inputs")
    write_part(run, 1, 0, _rows(0), "inputs")
    finish_step(run, TABLES, 1, kind="rollout", inputs={})
    table = read_table(run, "rollouts", 1)
    assert table.schema.equals(SCHEMAS["rollouts"], check_metadata=True)
    assert table.to_pylist() == _rows(0)["rollouts"] + _rows(1)["rollouts"]
    turns = read_table(run, "rollout_turns", 1, ["text", "token_ids"])
    assert turns.column_names == ["text", "token_ids"]
    assert turns.schema.field("token_ids").type == pa.large_list(pa.int32())
    assert turns.num_rows == 8


def test_equal_rows_give_equal_bytes(run: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory.create(tmp_path / "other", Config())
    for directory in (run, other):
        _finished(directory)
    for path in sorted(run.root.glob("roll*/*/*")):
        assert path.read_bytes() == (other.root / path.relative_to(run.root)).read_bytes()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(),
            st.lists(st.integers(0, 2**31 - 1)),
            st.lists(st.floats(width=32, allow_nan=False)),
            st.none() | st.text(),
        ),
        min_size=1,
    )
)
def test_any_text_tokens_and_floats_survive_the_round_trip(values: list[tuple[Any, ...]]) -> None:
    rows = [
        _turn(i, text=text, token_ids=ids, behaviour_logprobs=probs, action=action)
        for i, (text, ids, probs, action) in enumerate(values)
        if _encodable(text) and _encodable(action or "")
    ]
    assert arrow_table("rollout_turns", rows).to_pylist() == rows


def _encodable(text: str) -> bool:
    return not any(0xD800 <= ord(char) <= 0xDFFF for char in text)


def test_numpy_values_are_taken_for_what_they_are() -> None:
    row = _turn(
        0, token_ids=np.array([1, 2], np.int64), behaviour_logprobs=np.array([-1, -2], np.float64), turn=np.int64(4)
    )
    assert arrow_table("rollout_turns", [row]).to_pylist()[0]["token_ids"] == [1, 2]


@pytest.mark.parametrize(
    ("table", "row", "where"),
    [
        ("rollouts", _episode(0, score=float("nan")), "rollouts.score"),
        ("rollout_turns", _turn(0, behaviour_logprobs=[-1.0, float("nan")]), "rollout_turns.behaviour_logprobs"),
        ("rollout_turns", _turn(0, temperature=float("nan")), "rollout_turns.temperature"),
    ],
)
def test_nan_is_refused_and_the_column_named(table: str, row: dict[str, Any], where: str) -> None:
    with pytest.raises(NumericsError, match="NaN") as caught:
        arrow_table(table, [row])
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"turns": "three"}, "rollouts.turns"),
        ({"turns": 2**31}, "rollouts.turns"),
        ({"stop_reason": None}, "rollouts.stop_reason"),
        ({"colour": 1}, "rollouts.colour"),
        ({"error": "\ud800"}, "rollouts.error"),
    ],
)
def test_rows_that_do_not_fit_the_schema_are_refused_and_the_column_named(change: dict[str, Any], where: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        arrow_table("rollouts", [_episode(0), _episode(1) | change])
    assert str(caught.value.where).startswith(where)


def test_a_refused_row_publishes_no_file_of_its_part(run: RunDirectory) -> None:
    rows = _rows(0)
    rows["rollouts"][2]["score"] = float("nan")
    with pytest.raises(NumericsError):
        write_part(run, 1, 0, rows, "inputs")
    assert [path for path in run.root.rglob("*") if path.is_file() and path.name not in (".lock", "config.toml")] == []
    with pytest.raises(ArtifactError, match="another step"):
        write_part(run, 2, 0, _rows(0), "inputs")


def test_parts_with_other_inputs_or_damage_are_owed_again(run: RunDirectory) -> None:
    for part in range(5):
        write_part(run, 1, part, _rows(part), "other" if part == 1 else "inputs")
    turns = run.step_dir("rollout_turns", 1)
    (turns / "part-00002.parquet").unlink()
    damaged = turns / "part-00003.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-7])
    assert parts_done(run, TABLES, 1, "inputs") == {0, 4}
    for table in TABLES:
        names = sorted(path.name for path in run.step_dir(table, 1).iterdir())
        assert names == ["part-00000.parquet", "part-00004.parquet"]


def test_a_bit_flip_in_the_data_of_an_unfinished_part_is_noticed(run: RunDirectory) -> None:
    write_part(run, 1, 0, _rows(0), "inputs")
    path = run.step_dir("rollouts", 1) / "part-00000.parquet"
    content = path.read_bytes()
    column = pq.ParquetFile(path).metadata.row_group(0).column(1)
    offset = column.dictionary_page_offset or column.data_page_offset
    flipped = bytearray(content)
    flipped[offset + column.total_compressed_size - 3] ^= 8
    path.write_bytes(flipped)
    with pytest.raises(ArtifactError, match="rollout --run"):
        read_parts(run, "rollouts", 1)
    assert parts_done(run, TABLES, 1, "inputs") == set()


def test_read_parts_sees_what_is_published_before_the_step_is_finished(run: RunDirectory) -> None:
    assert read_parts(run, "rollouts", 1).num_rows == 0
    write_part(run, 1, 0, _rows(0), "inputs")
    assert read_parts(run, "rollouts", 1, ["won"]).num_rows == 4


def test_a_part_of_another_schema_version_is_refused(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = SCHEMAS["rollouts"].with_metadata({"rsipo.table": "rollouts", "rsipo.version": "999"})
    with monkeypatch.context() as patch:
        patch.setitem(SCHEMAS, "rollouts", newer)
        _finished(run)
    with pytest.raises(ArtifactError, match="expected version 2 of rollouts, found version 999 of rollouts"):
        read_table(run, "rollouts", 1)


def test_a_step_with_a_gap_in_its_parts_cannot_be_finished(run: RunDirectory) -> None:
    for part in (0, 2):
        write_part(run, 1, part, _rows(part), "inputs")
    with pytest.raises(ArtifactError, match="parts of a table are missing"):
        finish_step(run, TABLES, 1, kind="rollout", inputs={})


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "empty", "stray"])
@pytest.mark.parametrize("table", TABLES)
def test_damage_to_a_finished_step_names_the_file_and_the_command(run: RunDirectory, table: str, damage: str) -> None:
    _finished(run)
    path = run.step_dir(table, 1) / "part-00001.parquet"
    content = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif damage == "remove":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path = path.with_name("part-00002.parquet")
        path.write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        read_table(run, table, 1)
    assert caught.value.exit_code == 3
    assert str(path) in str(caught.value)
    assert f"rsipo rollout --run {run.root} --step 1 --force" in str(caught.value)


def test_an_unfinished_step_cannot_be_read(run: RunDirectory) -> None:
    write_part(run, 1, 0, _rows(0), "inputs")
    with pytest.raises(ArtifactError, match="unfinished"):
        read_table(run, "rollouts", 1)


def test_open_stage_owes_skips_refuses_and_rebuilds(run: RunDirectory) -> None:
    inputs = {"weights": "w"}
    assert open_stage(run, "rollout", 1, TABLES, inputs, force=False)
    _finished(run)
    assert not open_stage(run, "rollout", 1, TABLES, inputs, force=False)
    assert not open_stage(run, "rollout", 1, TABLES, inputs, force=True)
    with pytest.raises(ArtifactError, match=r"step 1 of rollout is stale.*weights \(was w, is v\).*--force") as caught:
        open_stage(run, "rollout", 1, TABLES, {"weights": "v"}, force=False)
    assert caught.value.exit_code == 3
    assert run.finished_steps("rollouts") == [1]
    assert open_stage(run, "rollout", 1, TABLES, {"weights": "v"}, force=True)
    assert not any(run.step_dir(table, 1).exists() for table in TABLES)


def test_open_stage_finds_hidden_damage_with_force_and_rebuilds(run: RunDirectory) -> None:
    _finished(run)
    path = run.step_dir("rollout_turns", 1) / "part-00000.parquet"
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)
    assert open_stage(run, "rollout", 1, TABLES, {"weights": "w"}, force=True)
    assert not path.exists()


def test_a_table_swapped_for_one_of_another_attempt_is_noticed(run: RunDirectory) -> None:
    _finished(run)
    finish_step(run, ("rollout_turns",), 1, kind="rollout", inputs={"weights": "older"})
    with pytest.raises(ArtifactError, match="not the one its stage wrote"):
        stage_status(run, TABLES, 1, {"weights": "w"})


def test_clearing_a_step_leaves_other_steps_alone(run: RunDirectory) -> None:
    _finished(run, 1)
    _finished(run, 2)
    clear_step(run, TABLES, 1)
    assert run.finished_steps("rollouts") == [2]
    assert read_table(run, "rollouts", 2).num_rows == 8


def _stage(root: Path) -> None:
    run = RunDirectory.open(root)
    with run.lock():
        done = parts_done(run, TABLES, 1, "inputs")
        for part in range(2):
            if part not in done:
                write_part(run, 1, part, _rows(part), "inputs")
        finish_step(run, TABLES, 1, kind="rollout", inputs={"weights": "w"}, extra={"tasks": 2})


def test_a_stage_killed_at_any_point_and_resumed_ends_with_the_same_bytes(run: RunDirectory, tmp_path: Path) -> None:
    total = calls_until_end(lambda: _stage(run.root))
    expected = _contents(run.root)
    assert total > 20
    for stop in range(1, total + 1):
        root = RunDirectory.create(tmp_path / f"killed-{stop}", Config()).root
        assert killed_at(stop, lambda root=root: _stage(root))
        assert set(_contents(root)) != set(expected) or stop > total - 3
        _stage(root)
        assert _contents(root) == expected


def _contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_a_full_disk_while_a_part_is_written_leaves_no_file_and_exits_with_1(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_part(run, 1, 0, _rows(0), "inputs")

    def full(table: pa.Table, where: Path, **options: Any) -> None:
        Path(where).write_bytes(b"half")
        raise OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device")

    monkeypatch.setattr(table_io.pq, "write_table", full)
    with pytest.raises(RsipoError, match="disk is full") as caught:
        write_part(run, 1, 1, _rows(1), "inputs")
    assert caught.value.exit_code == 1
    assert parts_done(run, TABLES, 1, "inputs") == {0}
    assert not list(run.root.rglob(".tmp-*"))


def test_a_really_full_file_system_is_reported_and_nothing_is_lost(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("a small tmpfs can be mounted by root only")
    try:
        run = RunDirectory.create(mount / "run", Config())
        rng = np.random.default_rng(0)
        with pytest.raises(RsipoError, match="disk is full") as caught:
            for part in range(100):
                ids = rng.integers(0, 2**31 - 1, 2000).tolist()
                rows = {"rollout_turns": [_turn(part, token_ids=ids)], "rollouts": [_episode(part)]}
                write_part(run, 1, part, rows, "inputs")
        assert caught.value.exit_code == 1
        done = parts_done(run, TABLES, 1, "inputs")
        assert done == set(range(len(done))) and len(done) >= 1
        assert not list(run.root.rglob(".tmp-*"))
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_duckdb_reads_beside_a_writer_that_holds_the_lock(run: RunDirectory) -> None:
    query = f"select count(*), count(won), min(seed) from '{run.root}/rollouts/*/*.parquet'"
    with run.lock():
        write_part(run, 1, 0, _rows(0), "inputs")
        assert duckdb.sql(query).fetchall() == [(4, 3, 2**62)]
        (run.step_dir("rollouts", 1) / ".tmp-part-00001.parquet-1").write_bytes(b"half")
        write_part(run, 2, 0, _rows(0, step=2), "inputs")
        with duckdb.connect() as first, duckdb.connect() as second:
            assert first.sql(query).fetchall() == second.sql(query).fetchall() == [(8, 6, 2**62)]
        joined = (
            f"select count(*) from '{run.root}/rollouts/*/*.parquet' e "
            f"join '{run.root}/rollout_turns/*/*.parquet' t using (step, episode_id) where step = 2"
        )
        assert duckdb.sql(joined).fetchall() == [(4,)]


def test_a_stopwatch_writes_a_file_of_its_own_for_every_attempt(run: RunDirectory) -> None:
    ticks = iter(float(i) for i in range(100))
    for _ in range(2):
        with Stopwatch(run, 1, "rollout", clock=lambda: next(ticks)) as watch, watch.measure("generate"):
            watch.add("tokens", 7)
    folder = run.step_dir("timings", 1)
    assert len(list(folder.glob("part-*.parquet"))) == 2
    rows = pq.ParquetFile(sorted(folder.iterdir())[0]).read().to_pylist()
    assert {row["name"]: row["value"] for row in rows} == {"tokens": 7.0, "generate": 1.0, "total_seconds": 3.0}


def test_a_failing_block_writes_no_timings(run: RunDirectory) -> None:
    with pytest.raises(RuntimeError), Stopwatch(run, 1, "rollout"):
        raise RuntimeError("stop")
    assert not run.step_dir("timings", 1).exists()


def test_a_loose_part_keeps_the_label_and_no_manifest(run: RunDirectory) -> None:
    path = write_loose_part(
        run, "timings", 1, "abc", [{"step": 1, "stage": "s", "attempt": "abc", "name": "n", "value": 1.0}]
    )
    assert path.name == "part-abc.parquet"
    assert not (path.parent / MANIFEST).exists()
