"""From tables to gains and trust: planted effects, reasons, carried statistics, order of rows, size."""

from __future__ import annotations

import math
import time

import numpy as np
import pyarrow as pa
import pytest

from schemas.config import GainsSection
from schemas.errors import ArtifactError
from stages.gain_tables import StepGains, estimate, gain_rows, statistics_rows
from stages.type_statistics import Statistics

GROUP, REPLAYS, MAX_TURNS = 8, 4, 20
TEXT = pa.large_string()


def episodes(rows: list[dict]) -> pa.Table:
    kinds = {
        "task_id": TEXT,
        "task_type": TEXT,
        "index": pa.int32(),
        "fingerprint": TEXT,
        "won": pa.bool_(),
        "turns": pa.int32(),
    }
    return pa.table(
        {name: pa.chunked_array([pa.array([row[name] for row in rows], kind)]) for name, kind in kinds.items()}
    )


def episode(task: str, index: int, won: bool | None, *, task_type: str = "heat", **changes: object) -> dict:
    plain = {"task_id": task, "task_type": task_type, "index": index, "fingerprint": f"start of {task}", "won": won}
    return plain | {"turns": MAX_TURNS} | changes


def skills(rows: list[tuple[str, str | None, str | None]]) -> pa.Table:
    columns = {"task_id": [r[0] for r in rows], "skill_id": [f"s-{r[0]}" for r in rows], "skill": [r[1] for r in rows]}
    columns["reason"] = [r[2] for r in rows]
    return pa.table({name: pa.chunked_array([pa.array(values, TEXT)]) for name, values in columns.items()})


def step_of(
    control_rate: float, replay_rate: float, *, tasks: int = 40, seed: int = 0, previous: Statistics | None = None
) -> StepGains:
    generator = np.random.default_rng(seed)
    names = [f"task{number}" for number in range(tasks)]
    types = {name: f"type{number % 2}" for number, name in enumerate(names)}
    rollouts = [
        episode(name, index, bool(generator.random() < control_rate), task_type=types[name])
        for name in names
        for index in range(GROUP)
    ]
    replays = [
        episode(name, index, bool(generator.random() < replay_rate), task_type=types[name])
        for name in names
        for index in range(REPLAYS)
    ]
    return run_estimate(rollouts, replays, [(name, "do this and that", None) for name in names], previous)


def run_estimate(
    rollouts: list[dict], replays: list[dict], written: list, previous: Statistics | None = None
) -> StepGains:
    return estimate(
        episodes(rollouts),
        episodes(replays),
        skills(written),
        previous or Statistics(),
        settings=GainsSection(),
        max_turns=MAX_TURNS,
        group_size=GROUP,
    )


def mean_trust(result: StepGains) -> float:
    return float(np.mean([row["trust"] for row in gain_rows(1, result, GainsSection())]))


def test_a_planted_good_skill_is_trusted_and_a_harmful_one_is_not() -> None:
    good, bad = step_of(0.3, 0.9), step_of(0.7, 0.1)
    assert np.all(good.shrunk.shrunk_gain_Q > 0) and mean_trust(good) > 1.5
    assert np.all(bad.shrunk.shrunk_gain_Q < 0) and mean_trust(bad) < 0.3


def test_skills_without_effect_leave_trust_near_one_over_many_steps() -> None:
    statistics: Statistics | None = None
    found = []
    for step in range(30):
        result = step_of(0.5, 0.5, tasks=16, seed=step, previous=statistics)
        statistics = result.statistics
        found.append(mean_trust(result))
    assert abs(np.mean(found[10:]) - 1.0) < 0.1


def test_the_intercept_of_trust_is_a_setting() -> None:
    result = step_of(0.5, 0.5)
    plain, lower = (
        np.array([row["trust"] for row in gain_rows(1, result, GainsSection(trust_intercept=value))])
        for value in (1.0, 0.75)
    )
    inside = (lower > 0) & (plain < 2)
    assert inside.any()
    np.testing.assert_allclose(plain[inside] - lower[inside], 0.25)


def test_gain_of_a_task_is_the_hand_worked_difference_of_mean_utilities() -> None:
    controls = [episode("a", index, index in (4, 5), turns=10 if index == 4 else 20) for index in range(GROUP)]
    replays = [episode("a", index, index < 3, turns=5) for index in range(REPLAYS)]
    (row,) = gain_rows(1, run_estimate(controls, replays, [("a", "x", None)]), GainsSection())
    # Controls (indices 4 to 7): 1 + 0.2 * 0.5, 1, 0, 0. Replays: three times 1 + 0.2 * 0.75, and 0.
    assert row["control_utility"] == pytest.approx((1.1 + 1.0) / 4)
    assert row["replay_utility"] == pytest.approx(3 * 1.15 / 4)
    assert row["replay_gain"] == pytest.approx(3 * 1.15 / 4 - 2.1 / 4)
    assert (row["controls"], row["replays"], row["reason"]) == (4, 4, None)


def reasons_of(result: StepGains) -> dict[str, str | None]:
    return dict(zip(result.task_ids, result.reasons, strict=True))


def test_every_task_without_a_gain_has_trust_one_and_the_first_reason() -> None:
    rollouts, replays = [], []
    for name in ("good", "no_skill", "no_control", "no_replay", "moved", "unwritten"):
        counted = None if name == "no_control" else False
        rollouts += [episode(name, index, counted if index >= 4 else False) for index in range(GROUP)]
    replays += [episode("good", index, True) for index in range(REPLAYS)]
    replays += [episode("no_control", index, True) for index in range(REPLAYS)]
    replays += [episode("no_replay", index, None) for index in range(REPLAYS)]
    replays += [episode("moved", index, True, fingerprint="elsewhere") for index in range(REPLAYS)]
    names = ("good", "no_control", "no_replay", "moved")
    written = [(name, "some skill text", None) for name in names] + [("no_skill", None, "no_json")]
    result = run_estimate(rollouts, replays, written)
    assert reasons_of(result) == {
        "good": None,
        "no_skill": "no_json",
        "no_control": "no_control",
        "no_replay": "no_replay",
        "moved": "fingerprint",
        "unwritten": "no_skill",
    }
    for row in gain_rows(1, result, GainsSection()):
        if row["task_id"] != "good":
            assert row["trust"] == 1.0 and row["replay_gain"] is None and row["skill_reward"] is None


def test_a_replay_from_another_start_is_left_out_and_the_others_count() -> None:
    rollouts = [episode("a", index, False) for index in range(GROUP)]
    replays = [episode("a", index, True) for index in range(3)] + [episode("a", 3, False, fingerprint="elsewhere")]
    (row,) = gain_rows(1, run_estimate(rollouts, replays, [("a", "x", None)]), GainsSection())
    assert row["replays"] == 3 and row["replay_utility"] == 1.0


def test_rollouts_that_disagree_about_their_start_make_no_gain() -> None:
    rollouts = [episode("a", index, False, fingerprint=f"start {index % 2}") for index in range(GROUP)]
    replays = [episode("a", index, True, fingerprint="start 0") for index in range(REPLAYS)]
    assert run_estimate(rollouts, replays, [("a", "x", None)]).reasons == ["fingerprint"]


def test_an_episode_that_does_not_count_is_no_control() -> None:
    rollouts = [episode("a", index, None if index == 7 else True) for index in range(GROUP)]
    replays = [episode("a", index, True) for index in range(REPLAYS)]
    (row,) = gain_rows(1, run_estimate(rollouts, replays, [("a", "x", None)]), GainsSection())
    assert row["controls"] == 3 and row["replay_gain"] == 0.0


def test_evidence_outcomes_do_not_enter_the_gain() -> None:
    def gain(evidence_won: bool) -> float:
        rollouts = [episode("a", index, evidence_won if index < 4 else index % 2 == 0) for index in range(GROUP)]
        replays = [episode("a", index, True) for index in range(REPLAYS)]
        return float(run_estimate(rollouts, replays, [("a", "x", None)]).gains.gain_Q[0])

    assert gain(True) == gain(False)


def test_order_of_rows_changes_no_bit() -> None:
    generator = np.random.default_rng(1)
    names = [f"t{n}" for n in range(7)]
    rollouts = [
        episode(n, i, bool(generator.random() < 0.5), turns=int(generator.integers(1, 20)))
        for n in names
        for i in range(GROUP)
    ]
    replays = [
        episode(n, i, bool(generator.random() < 0.5), turns=int(generator.integers(1, 20)))
        for n in names
        for i in range(REPLAYS)
    ]
    written = [(n, "x", None) for n in names]

    def rows(order: int) -> list[dict]:
        shuffled = np.random.default_rng(order)
        left = [rollouts[i] for i in shuffled.permutation(len(rollouts))]
        right = [replays[i] for i in shuffled.permutation(len(replays))]
        result = run_estimate(left, right, [written[i] for i in shuffled.permutation(len(written))])
        return sorted(gain_rows(1, result, GainsSection()), key=lambda row: row["task_id"])

    assert rows(1) == rows(2)


def test_statistics_rows_hold_no_nan_and_name_every_type_seen_so_far() -> None:
    first = step_of(0.5, 0.5)
    later = run_estimate(
        [episode("z", index, True, task_type="new") for index in range(GROUP)],
        [],
        [("z", None, "empty")],
        first.statistics,
    )
    rows = statistics_rows(2, later.statistics, 0.9)
    assert [row["task_type"] for row in rows] == ["*", "type0", "type1"]
    assert not any(isinstance(value, float) and math.isnan(value) for row in rows for value in row.values())


def test_a_replay_of_an_unknown_task_is_an_error() -> None:
    rollouts = [episode("a", index, False) for index in range(GROUP)]
    with pytest.raises(ArtifactError, match="has no rollouts"):
        run_estimate(rollouts, [episode("b", 0, True)], [("a", "x", None)])


@pytest.mark.slow
def test_two_million_episodes_take_seconds() -> None:
    tasks = 160_000
    names = np.repeat(np.char.add("task", np.arange(tasks).astype(str)), GROUP)
    generator = np.random.default_rng(0)

    def table(names: np.ndarray, per_task: int) -> pa.Table:
        count = len(names)
        columns = {
            "task_id": pa.array(names, TEXT),
            "task_type": pa.array(np.where(np.arange(count) // per_task % 2, "x", "y"), TEXT),
            "index": pa.array(np.tile(np.arange(per_task), count // per_task), pa.int32()),
            "fingerprint": pa.array(names, TEXT),
            "won": pa.array(generator.random(count) < 0.5),
            "turns": pa.array(generator.integers(1, MAX_TURNS, count), pa.int32()),
        }
        return pa.table({name: pa.chunked_array([column]) for name, column in columns.items()})

    rollouts, replays = table(names, GROUP), table(names[::2], REPLAYS)
    own = names[::GROUP]
    written = pa.table(
        {name: pa.chunked_array([pa.array(own, TEXT)]) for name in ("task_id", "skill_id", "skill")}
        | {"reason": pa.chunked_array([pa.nulls(tasks, TEXT)])}
    )
    start = time.perf_counter()
    result = estimate(
        rollouts, replays, written, Statistics(), settings=GainsSection(), max_turns=MAX_TURNS, group_size=GROUP
    )
    assert len(gain_rows(1, result, GainsSection())) == tasks
    assert time.perf_counter() - start < 30
