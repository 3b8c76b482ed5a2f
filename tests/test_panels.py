"""Panels: round trips, order independence, the official tree, and one clear sentence for every malformed input."""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from data.household.catalog import TASK_TYPES
from data.household.generator import generate_panel
from data.household.official_tree import read_tree
from data.household.oracle import solvability_fault
from data.household.panel_file import row_of
from data.household.panels import limit_panel, load_panel, write_panel
from data.tasks import Panel, Task
from rsipo_cli.tasks import app
from schemas.errors import ArtifactError, ConfigError, RsipoError

SHARED = Path(__file__).resolve().parents[2] / "shared" / "alfworld"


@pytest.fixture(scope="module")
def panel() -> Panel:
    return generate_panel("panel", seed=5, count=12, size="small", split="valid_seen")


@pytest.mark.parametrize("name", ["panel.jsonl", "panel.jsonl.xz"])
def test_a_panel_survives_the_round_trip_and_equal_panels_give_equal_bytes(
    panel: Panel, tmp_path: Path, name: str
) -> None:
    write_panel(panel, tmp_path / name)
    write_panel(panel, tmp_path / "again" / name)
    assert load_panel(str(tmp_path / name)).tasks == panel.tasks
    assert load_panel(str(tmp_path / name)).sha256 == panel.sha256
    assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert [path.name for path in (tmp_path / "again").iterdir()] == [name]


def test_the_order_of_lines_and_blank_lines_do_not_matter(panel: Panel, tmp_path: Path) -> None:
    lines = [json.dumps(row_of(task)) for task in panel]
    random.Random(1).shuffle(lines)
    path = tmp_path / "shuffled.jsonl"
    path.write_text("\n" + "\n\n".join(lines) + "\n")
    assert load_panel(str(path)).sha256 == panel.sha256


def test_a_generated_source_is_the_generator(panel: Panel) -> None:
    found = load_panel("generated:size=small,split=valid_seen,seed=5,count=12")
    assert found.sha256 == panel.sha256
    two = load_panel("generated:count=4,types=look_at_obj_in_light+pick_two_obj_and_place")
    assert sorted({task.task_type for task in two}) == ["look_at_obj_in_light", "pick_two_obj_and_place"]


def test_a_limit_takes_the_first_of_the_sorted_panel_or_spreads_over_types(panel: Panel) -> None:
    assert limit_panel(panel, 3).tasks == panel.tasks[:3]
    spread = limit_panel(panel, 6, spread=True)
    assert {task.task_type for task in spread} == set(TASK_TYPES)
    assert limit_panel(panel, 99).tasks == panel.tasks == limit_panel(panel, 99, spread=True).tasks
    with pytest.raises(ConfigError, match="limit"):
        limit_panel(panel, 0)


def changed(**changes: Any) -> Callable[[dict[str, Any]], str]:
    """A mutation of one row: fields replaced (None: removed), as a JSON line."""

    def mutate(row: dict[str, Any]) -> str:
        row = {**row, **changes}
        return json.dumps({name: value for name, value in row.items() if value is not None})

    return mutate


def parameters(**changes: Any) -> Callable[[dict[str, Any]], str]:
    def mutate(row: dict[str, Any]) -> str:
        merged = {**row["pddl_params"], **changes}
        kept = {name: value for name, value in merged.items() if value is not None}
        return json.dumps({**row, "pddl_params": kept})

    return mutate


MALFORMED: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "not JSON": (lambda row: "{'id': 1}", "not JSON"),
    "cut in the middle": (lambda row: json.dumps(row)[:100], "not JSON"),
    "deeply nested": (lambda row: "[" * 100_000, "not JSON"),
    "NaN": (lambda row: json.dumps({**row, "size": float("nan")}), "NaN"),
    "a list": (lambda row: "[1, 2]", "found list"),
    "id missing": (changed(id=None), "field id"),
    "id a number": (changed(id=7), "field id"),
    "instruction empty": (changed(task=" "), "field task"),
    "type unknown": (changed(task_type="pick_and_throw"), "pick_and_throw"),
    "split missing": (changed(split=None), "field split"),
    "scene a number": (changed(scene=12), "field scene"),
    "problem missing": (changed(pddl_problem=None), "field pddl_problem"),
    "problem of another domain": (changed(pddl_problem="(define (problem p) (:domain blocks))"), "(:domain alfred)"),
    "problem cut": (lambda row: json.dumps({**row, "pddl_problem": row["pddl_problem"].rstrip()[:-1]}), "as many"),
    "parameters a text": (changed(pddl_params="Apple"), "field pddl_params"),
    "parameter missing": (parameters(object_target=None), "pddl_params.object_target"),
    "parameter of the wrong type": (parameters(object_sliced="no"), "pddl_params.object_sliced"),
    "no destination": (parameters(parent_target=""), "pddl_params.parent_target"),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_line_gives_one_sentence_with_path_line_and_field(panel: Panel, tmp_path: Path, fault: str) -> None:
    mutate, part = MALFORMED[fault]
    rows = [row_of(task) for task in panel if task.task_type == "pick_and_place_simple"]
    path = tmp_path / "panel.jsonl"
    path.write_text(json.dumps(rows[0]) + "\n" + mutate(rows[1]) + "\n")
    with pytest.raises(ArtifactError) as caught:
        load_panel(str(path))
    sentence = str(caught.value)
    assert caught.value.exit_code == 3
    assert f"{path}, line 2" in sentence and part in sentence and "\n" not in sentence
    assert len(sentence) < 1000


def test_a_repeated_id_names_both_lines(panel: Panel, tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    line = json.dumps(row_of(panel.tasks[0])) + "\n"
    path.write_text(line + "\n" + line)
    with pytest.raises(ArtifactError, match=r"line 3.*line 1"):
        load_panel(str(path))


def truncated(path: Path, panel: Panel) -> Path:
    target = path / "cut.jsonl.xz"
    write_panel(panel, target)
    target.write_bytes(target.read_bytes()[:-40])
    return target


def plain_named_xz(path: Path, panel: Panel) -> Path:
    (path / "plain.xz").write_text("{}\n")
    return path / "plain.xz"


def compressed_named_plain(path: Path, panel: Panel) -> Path:
    (path / "panel.jsonl").write_bytes(lzma.compress(b"{}\n"))
    return path / "panel.jsonl"


def empty(path: Path, panel: Panel) -> Path:
    (path / "empty.jsonl").write_text("\n")
    return path / "empty.jsonl"


def absent(path: Path, panel: Panel) -> Path:
    return path / "absent.jsonl"


def no_games(path: Path, panel: Panel) -> Path:
    (path / "folder").mkdir()
    return path / "folder"


@pytest.mark.parametrize("make", [truncated, plain_named_xz, compressed_named_plain, empty, absent, no_games])
def test_a_damaged_or_missing_file_gives_one_sentence_with_its_path(
    panel: Panel, tmp_path: Path, make: Callable[[Path, Panel], Path]
) -> None:
    path = make(tmp_path, panel)
    with pytest.raises(ArtifactError) as caught:
        load_panel(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("generated:", "unknown option"),
        ("generated:seed=1", "count is missing"),
        ("generated:sede=1,count=3", "did you mean seed?"),
        ("generated:count=", "no value"),
        ("generated:count=3,count=4", "twice"),
        ("generated:count=many", "not a number"),
        ("generated:count=0", "a panel needs a task"),
        ("generated:count=2,size=huge", "unknown size"),
        ("generated:count=2,split=test", "unknown split"),
        ("generated:count=2,types=pick+place", "unknown task type"),
        ("alfworld:test", "unknown split"),
        ("alfworld:valid_seen", "ALFWORLD_DATA"),
    ],
)
def test_a_source_that_cannot_be_is_refused_with_exit_code_two(
    source: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(ConfigError) as caught:
        load_panel(source)
    assert caught.value.exit_code == 2 and part in str(caught.value)


def test_a_panel_that_cannot_be_written_leaves_nothing_behind(panel: Panel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot write"):
        write_panel(panel, tmp_path / "file" / "panel.jsonl")
    (tmp_path / "taken.jsonl").mkdir()
    with pytest.raises(ArtifactError, match="cannot write"):
        write_panel(panel, tmp_path / "taken.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken.jsonl"]


def write_trial(root: Path, task: Task, *, name: str | None = None, solvable: bool = True) -> Path:
    """One game in the layout of the official data."""
    folder = root / "json_2.1.x" / "valid_seen" / (name or f"{task.task_type}-X-None-Y-1") / "trial_T1"
    folder.mkdir(parents=True)
    trajectory = {"task_type": task.task_type, "pddl_params": task.payload["pddl_params"]}
    trajectory["scene"] = {"floor_plan": task.payload["scene"], "scene_num": 1}
    grammar = '"task": [{"rhs": "Your task is to: ' + task.text + '."}]'
    game = {"pddl_problem": task.payload["pddl_problem"], "grammar": grammar, "solvable": solvable, "pddl_domain": ""}
    (folder / "traj_data.json").write_text(json.dumps(trajectory))
    (folder / "game.tw-pddl").write_text(json.dumps(game))
    return folder


@pytest.fixture
def tree(panel: Panel, tmp_path: Path) -> Path:
    tasks = {task.task_type: task for task in panel}
    for task in tasks.values():
        write_trial(tmp_path, task)
    simple = tasks["pick_and_place_simple"]
    write_trial(tmp_path, simple, name="pick_and_place_with_movable_recep-X-Y-Z-1")
    write_trial(tmp_path, simple, name="pick_and_place_simple-AppleSliced-None-Y-1")
    write_trial(tmp_path, simple, name="pick_and_place_simple-U-None-Y-1", solvable=False)
    (write_trial(tmp_path, simple, name="pick_and_place_simple-M-None-Y-1") / "game.tw-pddl").unlink()
    (write_trial(tmp_path, simple, name="pick_and_place_simple-B-None-Y-1") / "game.tw-pddl").write_text("{")
    return tmp_path


def test_the_official_tree_is_read_alike_from_every_level_and_its_ids_are_relative_paths(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tree))
    levels = [tree, tree / "json_2.1.x", tree / "json_2.1.x" / "valid_seen"]
    panels = [load_panel("alfworld:valid_seen"), *(load_panel(str(level)) for level in levels)]
    assert len({panel.sha256 for panel in panels}) == 1
    assert [task.task_id for task in panels[0]] == sorted(
        f"valid_seen/{kind}-X-None-Y-1/trial_T1" for kind in TASK_TYPES
    )
    assert {task.split for task in panels[0]} == {"valid_seen"}
    assert all(solvability_fault(task) is None for task in panels[0])


def test_the_tree_report_counts_what_is_left_out_missing_and_bad(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, report = read_tree(tree)
    assert report.counts == {"valid_seen": 6} and report.left_out == 3
    assert report.missing == ("valid_seen/pick_and_place_simple-M-None-Y-1/trial_T1",)
    assert len(report.bad) == 1 and "pick_and_place_simple-B-None-Y-1" in report.bad[0]
    assert any("6 solvable games, the official data has 140" in line for line in report.warnings(whole_splits=True))
    load_panel(str(tree))
    assert "1 games cannot be read" in caplog.text and "1 trials hold no game" in caplog.text


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_the_commands_generate_list_and_check_agree_on_the_panel(panel: Panel, tmp_path: Path) -> None:
    path = str(tmp_path / "panel.jsonl.xz")
    made = run("generate", "--out", path, "--size", "small", "--split", "valid_seen", "--seed", "5", "--count", "12")
    assert made.exit_code == 0 and panel.sha256 in made.stdout
    listed = json.loads(run("list", path, "--json").stdout)
    assert listed["sha256"] == panel.sha256 and listed["games"] == 12
    assert [row["id"] for row in listed["tasks"]] == [task.task_id for task in panel]
    assert set(listed["types"]) == set(TASK_TYPES)
    checked = run("check", path)
    assert checked.exit_code == 0 and "12 of 12 games are good" in checked.stdout


def test_check_names_a_game_that_cannot_be_won_and_exits_with_one(panel: Panel, tmp_path: Path) -> None:
    path = tmp_path / "panel.jsonl"
    rows = [row_of(task) for task in panel if task.task_type == "pick_and_place_simple"]
    rows[0]["pddl_problem"] = rows[0]["pddl_problem"].replace("(pickupable ", "(moveable ")
    path.write_text("\n".join(json.dumps(row) for row in rows))
    result = run("check", str(path))
    assert result.exit_code == 1
    assert f"bad: {rows[0]['id']}" in result.stdout and "1 of 2 games are good" in result.stdout


def test_a_listing_escapes_control_characters_of_the_file(panel: Panel, tmp_path: Path) -> None:
    path = tmp_path / "panel.jsonl"
    path.write_text(json.dumps({**row_of(panel.tasks[0]), "task": "put \x1b[31mred\x1b[0m\nthing"}))
    assert "\x1b" not in run("list", str(path)).stdout


def test_errors_of_the_commands_carry_their_class_to_the_caller(tmp_path: Path) -> None:
    result = run("list", str(tmp_path / "absent.jsonl"))
    assert isinstance(result.exception, RsipoError) and result.exception.exit_code == 3


@pytest.mark.parametrize(("name", "count"), [("valid_seen", 140), ("train_sample", 200)])
def test_every_real_game_is_read_and_won_by_the_oracle(name: str, count: int) -> None:
    path = SHARED / f"{name}.jsonl.xz"
    if not path.is_file():
        pytest.skip("the real games are not beside the checkout")
    real = load_panel(str(path))
    assert len(real) == count
    assert [fault for task in real if (fault := solvability_fault(task))] == []
