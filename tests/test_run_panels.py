"""Panels of a run, task choice, split and evidence, and the figures of reports: all pure or nearly so."""

from __future__ import annotations

import lzma
import math
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from data.progress import SilentReporter
from data.tasks import Panel, Task
from schemas.errors import ArtifactError, ConfigError
from schemas.run_directory import RunDirectory
from schemas.tables import LABELS, METRICS
from stages import panels
from stages.evidence import Candidate, choose_evidence, is_control
from stages.reports import episode_figures, evaluation_report, wilson_interval
from stages.stage import Stopwatch
from stages.workbench import Workbench
from tests.small_world import SmallWorld, small_config, small_task


def panel_of(size: int, types: int = 3) -> Panel:
    tasks = [Task(f"t{index:04d}", f"type{index % types}", "train", "text", {"n": index}) for index in range(size)]
    return Panel.of("p", tasks)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 5))
def test_an_epoch_plays_no_task_twice_and_leaves_out_fewer_tasks_than_a_step(
    size: int, per_step: int, seed: int
) -> None:
    if per_step > size:
        with pytest.raises(ConfigError, match="smaller than one step"):
            panels.steps_per_epoch(size, per_step)
        return
    panel = panel_of(size)
    steps = panels.steps_per_epoch(size, per_step)
    chosen = [
        task.task_id
        for step in range(1, steps + 1)
        for task in panels.tasks_of_step(panel, seed=seed, step=step, per_step=per_step)
    ]
    assert len(chosen) == len(set(chosen)) == steps * per_step > size - per_step


def test_the_tasks_of_a_step_depend_on_seed_step_and_panel_alone() -> None:
    panel = panel_of(24)

    def choice(seed: int, step: int, source: Panel = panel) -> list[str]:
        return [task.task_id for task in panels.tasks_of_step(source, seed=seed, step=step, per_step=6)]

    shuffled = Panel.of("other name", list(reversed(panel.tasks)))
    assert choice(0, 3) == choice(0, 3, shuffled)
    assert choice(0, 1) != choice(1, 1)
    assert choice(0, 1) != choice(0, 5)  # step 5 opens the second epoch
    assert sorted(choice(0, 1) + choice(0, 2) + choice(0, 3) + choice(0, 4)) == [task.task_id for task in panel]


@given(st.integers(0, 30), st.integers(1, 8))
def test_every_step_holds_each_task_type_in_proportion(seed: int, step: int) -> None:
    types = Counter(task.task_type for task in panels.tasks_of_step(panel_of(48), seed=seed, step=step, per_step=12))
    assert set(types.values()) <= {3, 4, 5} and len(types) == 3


def test_steps_are_counted_from_one() -> None:
    with pytest.raises(ConfigError, match="counted from 1"):
        panels.tasks_of_step(panel_of(4), seed=0, step=0, per_step=2)


def test_a_panel_is_resolved_once_and_survives_a_changed_source(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", small_config(tmp_path))
    world = SmallWorld()
    panels.resolve_panel(run, panels.TRAIN, world)
    first = panels.load_panel(run, panels.TRAIN)
    assert first.tasks == world.panel("0-12").tasks
    assert panels.panel_record(run, panels.TRAIN)["sha256"] == first.sha256

    class Improved(SmallWorld):
        def panel(self, source: str, *, limit: int | None = None) -> Panel:
            raise AssertionError("the source must not be read again")

    panels.resolve_panel(run, panels.TRAIN, Improved())
    assert panels.load_panel(run, panels.TRAIN).sha256 == first.sha256


def test_equal_panels_are_stored_as_equal_bytes() -> None:
    assert panels.encode_panel(panel_of(5)) == panels.encode_panel(panel_of(5))


def test_a_training_panel_smaller_than_a_step_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", small_config(tmp_path, tasks__train="0-3"))
    with pytest.raises(ConfigError, match=r"tasks\.per_step"):
        panels.resolve_panel(run, panels.TRAIN, SmallWorld())
    assert not panels.is_resolved(run, panels.TRAIN)


def test_a_flipped_bit_in_a_panel_is_found(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", small_config(tmp_path))
    panels.resolve_panel(run, panels.TRAIN, SmallWorld())
    path = run.panel_path(panels.TRAIN)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ArtifactError, match=r"train\.jsonl\.xz"):
        panels.load_panel(run, panels.TRAIN)


@given(st.integers(2, 9))
def test_the_split_is_by_index_and_both_halves_hold_a_rollout(group_size: int) -> None:
    control = [index for index in range(group_size) if is_control(index, group_size)]
    assert control == list(range(group_size // 2, group_size)) and 0 < len(control) < group_size


candidates = st.lists(
    st.tuples(st.sampled_from([True, False, None]), st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=8
)


@given(candidates, st.randoms())
def test_evidence_is_the_best_usable_episode_of_the_evidence_half_in_any_order(drawn: list, random: object) -> None:
    rollouts = [Candidate(index, won, turns, min(valid, turns)) for index, (won, turns, valid) in enumerate(drawn)]
    chosen = choose_evidence(rollouts, len(rollouts))
    usable = [c for c in rollouts[: len(rollouts) // 2] if c.won is not None and c.turns > 0]
    shuffled = list(rollouts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose_evidence(shuffled, len(rollouts)) == chosen
    if not usable:
        assert chosen is None
        return
    assert chosen is not None
    best = rollouts[chosen]
    assert best in usable
    for other in usable:
        if other.won == best.won:
            worse = other.turns > best.turns if best.won else other.valid_turns < best.valid_turns
            assert worse or other.index >= best.index
        else:
            assert best.won


@pytest.mark.parametrize("outcome", [True, False, None])
def test_outcomes_of_control_rollouts_never_change_the_evidence(outcome: bool | None) -> None:
    evidence = [Candidate(0, False, 5, 2), Candidate(1, False, 5, 3)]
    controls = [Candidate(2, outcome, 1, 1), Candidate(3, outcome, 1, 1)]
    assert choose_evidence([*evidence, *controls], 4) == 1


@settings(max_examples=60)
@given(st.integers(1, 300), st.data())
def test_wilson_interval_equals_scipys(episodes: int, data: st.DataObject) -> None:
    wins = data.draw(st.integers(0, episodes))
    expected = binomtest(wins, episodes).proportion_ci(0.95, method="wilson")
    low, high = wilson_interval(wins, episodes)
    assert math.isclose(low, expected.low, abs_tol=1e-12) and math.isclose(high, expected.high, abs_tol=1e-12)


def episode_table(rows: list[dict]) -> pa.Table:
    plain = {"task_id": "a", "task_type": "x", "won": True, "turns": 2, "invalid_turns": 0, "stop_reason": "done"}
    full = [plain | {"error": None, "sampled_tokens": 5, "metrics": None, "labels": None} | row for row in rows]
    kinds = {"won": pa.bool_(), "error": pa.string(), "metrics": METRICS, "labels": LABELS}
    names = full[0].keys()
    return pa.table({name: pa.array([row[name] for row in full], kinds.get(name)) for name in names})


def test_a_report_counts_an_environment_error_as_not_won_and_names_it() -> None:
    table = episode_table(
        [
            {"task_id": "a", "won": True},
            {"task_id": "b", "won": True},
            {"task_id": "c", "task_type": "y", "won": None, "turns": 0, "stop_reason": "env_error", "error": "broke"},
            {
                "task_id": "d",
                "task_type": "y",
                "won": False,
                "invalid_turns": 1,
                "turns": 4,
                "stop_reason": "max_turns",
            },
        ]
    )
    report = evaluation_report(table)
    assert (report.micro.wins, report.micro.episodes, report.micro.rate) == (2, 4, 0.5)
    assert [(rate.name, rate.rate) for rate in report.by_type] == [("x", 1.0), ("y", 0.0)]
    assert report.macro_rate == 0.5
    assert report.failed == (("c", "broke"),)
    assert report.stop_reasons == {"done": 2, "env_error": 1, "max_turns": 1}
    assert report.invalid_share == 1 / 8 and report.mean_turns == 2.0
    assert evaluation_report(table.take([3, 1, 0, 2])) == report


def test_metrics_are_means_over_all_episodes_and_labels_are_rates_of_their_own() -> None:
    table = episode_table(
        [
            {"task_id": "a", "metrics": [("f1", 1.0)], "labels": [("hops", "1")]},
            {"task_id": "b", "metrics": [("f1", 0.5)], "labels": [("hops", "2")], "won": False},
            {"task_id": "c", "won": None, "stop_reason": "env_error", "error": "broke", "labels": [("hops", "2")]},
            {"task_id": "d"},
        ]
    )
    report = evaluation_report(table)
    assert report.metrics == {"f1": 0.375}
    assert [(rate.name, rate.wins, rate.episodes) for rate in report.by_label] == [("hops=1", 1, 1), ("hops=2", 0, 2)]
    summary = report.as_summary()
    assert summary["mean_f1"] == 0.375 and [row["label"] for row in summary["by_label"]] == ["hops=1", "hops=2"]
    assert "by_label" not in evaluation_report(episode_table([{}])).as_summary()


def test_macro_success_gives_every_type_one_vote() -> None:
    rows = [{"task_id": f"x{n}", "won": True} for n in range(9)] + [{"task_id": "y", "task_type": "y", "won": False}]
    report = evaluation_report(episode_table(rows))
    assert report.micro.rate == 0.9 and report.macro_rate == 0.5


def test_screen_figures_leave_episodes_that_do_not_count_out_of_success() -> None:
    figures = episode_figures(episode_table([{"won": True}, {"won": None, "stop_reason": "timeout"}]))
    assert figures["success"] == 1.0 and figures["env_errors"] == 1 and figures["episodes"] == 2


def test_small_tasks_have_stable_hashes() -> None:
    assert small_task(3).sha256 == small_task(3).sha256 != small_task(4).sha256


def test_labels_of_tasks_are_kept_in_a_run_s_panel() -> None:
    task = Task("a", "x", "train", "text", {"n": 1}, {"hops": "2"})
    plain = Task("b", "x", "train", "text", {"n": 1})
    content = panels.encode_panel(Panel.of("p", [task, plain]))
    lines = lzma.decompress(content).decode().splitlines()
    assert '"labels": {"hops": "2"}' in lines[0] and "labels" not in lines[1]


def test_what_an_environment_counts_is_noted_since_the_last_note_and_kept_in_timings(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", small_config(tmp_path))
    notes: list[str] = []
    reporter, watch = SilentReporter(), Stopwatch(run, 1, "rollout")
    reporter.note = notes.append  # type: ignore[method-assign]
    world = CountingWorld()
    with Workbench(run) as bench:
        bench.__dict__["environment"] = world
        for hits, misses in ((3, 1), (3, 1), (4, 5)):
            world.totals = {"queries": float(hits + misses), "cache_hits": float(hits), "cache_misses": float(misses)}
            bench.note_environment_work(watch, reporter)
    assert notes == [
        "small: queries 4, cache 3 of 4 hit (75.0 %)",
        "small: queries 5, cache 1 of 5 hit (20.0 %)",
    ]
    assert watch._values == {"small_queries": 9.0, "small_cache_hits": 4.0, "small_cache_misses": 5.0}
    assert world.closed


class CountingWorld(SmallWorld):
    """A world that counts and holds something."""

    totals: dict[str, float] = {}
    closed = False

    def counters(self) -> dict[str, float]:
        return self.totals

    def close(self) -> None:
        self.closed = True
