"""The pure parts of the benchmark scripts: verdicts, the curve read from a record, its CSV and its picture."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import learning_curve, planted_skills
from benchmarks.curve_svg import MOST_TICKS, CurvePoint, curve_svg, tick_points, x_of, y_of
from benchmarks.planted_skills import Figures, judge, planted_skill
from data.environments import EnvironmentSpec
from data.household.catalog import TASK_TYPES
from data.household.demonstrator import GOOD_PLANS
from data.search.relations import DATA_SETS, HOPS
from data.tasks import Task
from schemas.config_loading import load_config, override_config
from schemas.errors import ArtifactError
from schemas.run_directory import RunDirectory
from schemas.table_io import finish_step, write_loose_part, write_part

# --- planted skills


def figures(condition: str, shrunk_gain: float, error: float = 0.03) -> Figures:
    trust = min(2.0, max(0.0, 1.0 + 2.0 * shrunk_gain))
    return Figures(condition, 48, 384, 0.3, 0.3, 0.3, 0.3, shrunk_gain, error, shrunk_gain, trust, 0.5)


@pytest.mark.parametrize(
    ("condition", "shrunk_gain", "good"),
    [
        ("good", 0.3, True),
        ("good", -0.3, False),
        ("harmful", -0.3, True),
        ("harmful", 0.3, False),
        ("vague", 0.02, True),
        ("vague", -0.3, False),
        ("none", -0.04, True),
        ("none", 0.3, False),
    ],
)
def test_a_condition_is_judged_by_what_its_skills_are_worth(condition: str, shrunk_gain: float, good: bool) -> None:
    verdict = judge(figures(condition, shrunk_gain), trust_slope=2.0, tolerance=0.1)
    assert verdict.good is good
    assert verdict.text.startswith("yes" if good else "NO:")


@pytest.mark.parametrize(("condition", "shrunk_gain"), [("good", 0.1), ("harmful", -0.1), ("none", 0.1)])
def test_a_verdict_within_the_noise_is_not_sure_and_does_not_pass(condition: str, shrunk_gain: float) -> None:
    verdict = judge(figures(condition, shrunk_gain, error=0.2), trust_slope=2.0, tolerance=0.1)
    assert not verdict.good
    assert verdict.text.startswith("NOT SURE")


def test_a_verdict_without_an_error_never_passes() -> None:
    assert not judge(figures("none", 0.0, error=math.nan), trust_slope=2.0, tolerance=0.1).good


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_planted_skills_say_what_their_condition_says(task_type: str) -> None:
    tools = {"pick_clean_then_place_in_recep": "sinkbasin", "pick_heat_then_place_in_recep": "microwave"}
    tools |= {"pick_cool_then_place_in_recep": "fridge", "look_at_obj_in_light": "desklamp"}
    task = Task("t", task_type, "train", "", {})
    good, harmful, vague = (planted_skill(name, task, 0) for name in ("good", "harmful", "vague"))
    assert tools.get(task_type, "target") in good
    assert good.count("then") + 1 == max(2, len(GOOD_PLANS[task_type]))
    assert len({good, harmful, vague, planted_skill("none", task, 0)}) == 4
    assert planted_skill("none", task, 0) == ""
    assert planted_skill("good", task, 0) == good


@pytest.mark.parametrize("data_set", DATA_SETS)
def test_planted_skills_of_searches_say_how_often_to_search(data_set: str) -> None:
    task = Task("t", data_set, "test", "", {})
    good, harmful, vague = (planted_skill(name, task, 0) for name in ("good", "harmful", "vague"))
    assert good.count("then") == HOPS[data_set]
    assert harmful.count("then") != HOPS[data_set] or "stop" in harmful
    assert "then" not in vague
    assert planted_skill("none", task, 0) == ""


def test_every_world_with_planted_skills_has_held_out_tasks() -> None:
    presets = {"household": "household-tiny", "search": "search-tiny"}
    assert set(planted_skills.HELD_OUT) == set(presets)
    for name, preset in presets.items():
        spec = EnvironmentSpec(name, load_config(preset).env.options)
        panel = spec.build().panel(planted_skills.HELD_OUT[name].format(seed=0, tasks=12))
        assert len(panel) == 12 and len({task.task_type for task in panel}) >= 4


def test_the_table_has_a_line_for_every_condition() -> None:
    found = [figures(name, 0.0) for name in planted_skills.EXPECTED]
    verdicts = [judge(entry, trust_slope=2.0, tolerance=0.1) for entry in found]
    lines = planted_skills.table_text(found, verdicts).splitlines()
    assert [line.split()[0] for line in lines[-4:]] == list(planted_skills.EXPECTED)


# --- the curve from the record


def eval_row(step: int, task: int, won: bool | None) -> dict[str, object]:
    return {
        "step": step,
        "episode_id": f"e-{step}-{task}",
        "task_id": f"t{task}",
        "task_type": "even" if task < 3 else "odd",
        "task_sha256": "0" * 64,
        "index": 0,
        "skill_id": None,
        "seed": task,
        "fingerprint": None,
        "won": won,
        "score": None,
        "turns": 1,
        "invalid_turns": 0,
        "sampled_tokens": 1,
        "stop_reason": "done",
        "error": None,
        "final_observation": None,
        "weights_sha256": "0" * 64,
        "panel": "p",
        "panel_sha256": "0" * 64,
    }


def record(root: Path) -> RunDirectory:
    """Evaluations of 4 tasks at steps 0 and 2 (finished) and 3 (not finished), with timings of steps 0 to 2."""
    run = RunDirectory.create(root, load_config("household-tiny"))
    wins = {0: (True, False, None, False), 2: (False, True, True, True), 3: (True, True, True, True)}
    for step, won in wins.items():
        rows = [eval_row(step, task, value) for task, value in enumerate(won)]
        write_part(run, step, 0, {"eval_turns": [], "evals": rows}, "hash")
        if step < 3:
            finish_step(run, ("eval_turns", "evals"), step, kind="evaluate", inputs={}, extra={})
    for step, stage, seconds in [(0, "evaluate", 60), (1, "rollout", 120), (2, "train-step", 30), (2, "evaluate", 600)]:
        row = {"step": step, "stage": stage, "attempt": "a", "name": "total_seconds", "value": float(seconds)}
        write_loose_part(run, "timings", step, f"{stage}-a", [row, row | {"name": "tokens", "value": 1e6}])
    return run


def test_the_curve_holds_finished_evaluations_with_errors_as_losses_and_types_weighted_alike(tmp_path: Path) -> None:
    points = learning_curve.read_curve(record(tmp_path))
    assert [(p.step, p.won, p.episodes, p.success) for p in points] == [(0, 1, 4, 0.25), (2, 3, 4, 0.75)]
    assert [p.macro for p in points] == pytest.approx([(1 / 3 + 0) / 2, (2 / 3 + 1) / 2])
    assert all(p.low < p.success < p.high for p in points)


def test_minutes_are_those_of_the_stages_before_a_checkpoint_without_its_own_evaluation(tmp_path: Path) -> None:
    points = learning_curve.read_curve(record(tmp_path))
    assert [p.minutes for p in points] == [0.0, pytest.approx((60 + 120 + 30) / 60)]


def test_a_run_without_evaluations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no evaluation"):
        learning_curve.read_curve(RunDirectory.create(tmp_path, load_config("household-tiny")))


def test_checkpoints_are_compared_task_by_task(tmp_path: Path) -> None:
    run = record(tmp_path)
    found = learning_curve.compare("p", learning_curve.outcomes(run, 0), learning_curve.outcomes(run, 2))
    assert (found.first_won, found.last_won, found.gained, found.lost) == (1, 3, 3, 1)
    assert found.p_value == pytest.approx(2 * (4 + 1) / 16)  # binomial(4, 1/2), 3 or more of 4, both sides


def test_equal_outcomes_give_a_p_value_of_one_and_other_tasks_are_refused() -> None:
    won = {("a", 0): True, ("b", 0): False}
    assert learning_curve.compare("p", won, won).p_value == 1.0
    with pytest.raises(ArtifactError):
        learning_curve.compare("p", won, {("a", 0): True})


def test_the_command_of_a_curve_makes_the_same_configuration() -> None:
    base = load_config("household-tiny")
    settings = ["optimizer.lr=0.0001", "model.path=a b/c", "learner.minibatch_rows=8", "env.options.driver=stock"]
    config = override_config(base, settings)
    found = learning_curve.changed_settings(base, config)
    assert override_config(base, found) == config
    assert learning_curve.changed_settings(base, base) == []
    assert "--set 'model.path=a b/c'" in learning_curve.command_line("household-tiny", 3, found)


@pytest.mark.parametrize(
    ("last", "minutes", "good"), [(0.6, 59.0, True), (0.5, 59.0, False), (0.6, 61.0, False), (0.6, None, False)]
)
def test_learning_counts_when_it_is_enough_and_in_time(last: float, minutes: float | None, good: bool) -> None:
    points = [point(0, 0.3), replace(point(10, last), minutes=None)]
    assert learning_curve.judge(points, minutes)[0] is good


def test_wall_clock_time_is_known_only_when_every_process_was_measured(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, load_config("household-tiny"))
    path = run.log_path.parent / learning_curve.DURATIONS
    path.parent.mkdir()
    path.write_text('{"from": 0, "to": 2, "seconds": 60}\n{"from": 2, "to": 5, "seconds": 30}\n')
    assert learning_curve.wall_clock_minutes(run, 5) == 1.5
    assert learning_curve.wall_clock_minutes(run, 6) is None
    path.write_text('{"from": 1, "to": 5, "seconds": 30}\n')
    assert learning_curve.wall_clock_minutes(run, 5) is None


# --- its CSV and its picture


def point(step: int, success: float) -> CurvePoint:
    return CurvePoint(step, step / 2, 120, round(120 * success), success, success - 0.1, success + 0.1, success)


def test_the_csv_has_the_command_in_its_first_line_and_empty_cells_for_unknown_minutes() -> None:
    text = learning_curve.curve_csv([replace(point(0, 0.25), minutes=None), point(10, 0.5)], ["python x"])
    comment, header, first, second = text.splitlines()
    assert comment == "# python x"
    assert first.split(",")[:3] == ["0", "", "120"]
    assert len(header.split(",")) == len(first.split(",")) == len(second.split(","))


def test_the_picture_is_well_formed_and_shows_every_evaluation_in_its_place() -> None:
    points = [point(10, 0.5), point(0, 0.25), point(20, 0.75)]
    root = ElementTree.fromstring(curve_svg(points, 'a <b> & "c"', "sub"))
    dots = root.findall("{*}circle")
    assert [float(dot.attrib["cx"]) for dot in dots] == pytest.approx([x_of(s, 20) for s in (0, 10, 20)], abs=0.1)
    assert [float(dot.attrib["cy"]) for dot in dots] == pytest.approx([y_of(v) for v in (0.25, 0.5, 0.75)], abs=0.1)
    words = [element.text for element in root.findall("{*}text")]
    assert {'a <b> & "c"', "25%", "75%", "10", "20"} <= set(words)
    assert "prefers-color-scheme: dark" in curve_svg(points, "t", "s")


def test_one_evaluation_is_a_picture_too_and_none_is_refused() -> None:
    ElementTree.fromstring(curve_svg([point(0, 0.5)], "t", "s"))
    with pytest.raises(ValueError, match="point"):
        curve_svg([], "t", "s")


@pytest.mark.parametrize("count", [1, 2, 11, 12, 16, 23, 100])
def test_ticks_are_few_in_order_and_end_with_the_last_evaluation(count: int) -> None:
    points = [point(step, 0.5) for step in range(count)]
    ticks = [tick.step for tick in tick_points(points)]
    assert ticks == sorted(set(ticks))
    assert ticks[-1] == count - 1
    assert len(ticks) <= MOST_TICKS + 1
