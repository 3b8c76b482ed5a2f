"""Gains, type statistics, shrinkage, skill reward and trust: numbers worked by hand, then properties."""

from __future__ import annotations

import doctest
import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stages.advantages
import stages.estimators
import stages.type_statistics
from schemas.errors import ConfigError, NumericsError
from stages.estimators import (
    grouped_sums,
    replay_gains,
    shrinkage_factor,
    shrunk_gain,
    skill_rewards,
    task_moments,
    trust,
    utility,
)
from stages.type_statistics import (
    MovingAverage,
    Statistics,
    TaskGains,
    TypeStatistics,
    encode_types,
    shrink,
    update_statistics,
)

finite = st.floats(-3.0, 3.0, allow_nan=False)
unit = st.floats(0.0, 1.0, allow_nan=False)


def gains_of(replays: list[list[float]], controls: list[list[float]], types: list[str], excluded=None) -> TaskGains:
    """Task gains from one list of utilities a task and side."""

    def moments(sides: list[list[float]]):
        tasks = [task for task, values in enumerate(sides) for _ in values]
        return task_moments([value for values in sides for value in values], tasks, len(sides))

    replay, control = moments(replays), moments(controls)
    codes, names = encode_types(types)
    return TaskGains(replay_gains(replay, control, excluded), replay, control, codes, names)


@pytest.mark.parametrize("module", [stages.estimators, stages.type_statistics, stages.advantages])
def test_documented_examples_hold(module):
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0 and outcome.failed == 0


# --- utility and gain


def test_utility_rewards_a_win_and_its_speed():
    assert utility([1, 1, 1, 0], [30, 0, 15, 1], 30).tolist() == [1.0, 1.2, 1.1, 0.0]


def test_utility_refuses_more_turns_than_the_limit():
    with pytest.raises(NumericsError):
        utility([1], [31], 30)


@settings(deadline=None)
@given(st.integers(1, 50), st.data())
def test_utility_of_a_win_falls_with_every_turn_and_stays_above_any_loss(limit, data):
    turns = data.draw(st.integers(0, limit - 1))
    earlier, later = utility([1, 1], [turns, turns + 1], limit)
    assert earlier > later >= 1.0 > utility(0, 0, limit)


def test_replay_gain_by_hand():
    gains = gains_of([[1.0, 1.0, 0.0, 1.2]], [[0.0, 1.0, 0.0, 0.0]], ["a"])
    assert gains.gain_Q.tolist() == pytest.approx([0.8 - 0.25], abs=1e-15)


def test_gain_is_missing_without_a_valid_side_or_when_excluded():
    gains = gains_of([[1.0], [], [1.0], [1.0]], [[0.0], [0.0], [], [0.0]], list("aaaa"), [False, False, False, True])
    assert gains.gain_Q[0] == 1.0 and np.isnan(gains.gain_Q[1:]).all()
    assert gains.scored_Q.tolist() == [True, False, False, False]


def test_moments_of_a_constant_task_have_exactly_no_variance():
    moments = task_moments([0.1] * 7 + [0.3] * 3, [0] * 7 + [1] * 3, 2)
    assert moments.squared_deviations_Q.tolist() == [0.0, 0.0]


def test_moments_refuse_a_utility_that_is_not_finite():
    with pytest.raises(NumericsError):
        task_moments([0.0, math.nan], [0, 0], 1)


@settings(deadline=None)
@given(st.lists(st.tuples(finite, st.integers(0, 4)), min_size=1, max_size=40), st.randoms())
def test_sums_do_not_depend_on_the_order_of_rows_to_the_last_bit(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)

    def sums(pairs):
        return grouped_sums(np.array([v for v, _ in pairs]), np.array([g for _, g in pairs]), 5).tolist()

    assert sums(rows) == sums(shuffled)


# --- moving averages


@settings(deadline=None)
@given(st.lists(finite, min_size=1, max_size=20))
def test_corrected_average_becomes_the_plain_mean_as_the_decay_nears_one(values):
    average = MovingAverage()
    for value in values:
        average = average.updated(value, 1.0 - 1e-9)
    assert average.value(1.0 - 1e-9) == pytest.approx(np.mean(values), abs=1e-6)


@settings(deadline=None)
@given(finite, st.integers(1, 30), st.floats(0.0, 0.99))
def test_average_of_a_constant_is_that_constant(value, steps, decay):
    average = MovingAverage()
    for _ in range(steps):
        average = average.updated(value, decay)
    assert average.value(decay) == pytest.approx(value, abs=1e-12)


@settings(deadline=None)
@given(st.lists(finite, min_size=1, max_size=20))
def test_average_without_memory_is_the_latest_value(values):
    average = MovingAverage()
    for value in values:
        average = average.updated(value, 0.0)
    assert average.value(0.0) == values[-1]


def test_a_missing_value_changes_neither_average_nor_age():
    average = MovingAverage().updated(1.0, 0.9)
    assert average.updated(math.nan, 0.9) == average
    assert math.isnan(MovingAverage().value(0.9))


# --- statistics


def two_task_step() -> TaskGains:
    """Type a: gains 1 and 0; within-task squares: replays 0 and 1 over 3 + 1 degrees, controls 0.5 and 0 over 1 + 1."""
    return gains_of([[1.5, 1.5, 1.5, 1.5], [1.0 + 0.5**0.5, 1.0 - 0.5**0.5]], [[1.0, 0.0], [1.0, 1.0]], ["a", "a"])


def test_first_step_statistics_by_hand():
    statistics = update_statistics(Statistics(), two_task_step())
    own = statistics.of("a")
    assert own.gain.value(0.9) == pytest.approx(0.5, abs=1e-14)  # m_c
    assert own.replay_variance.value(0.9) == pytest.approx(1.0 / 4.0, abs=1e-14)  # pooled, not the mean of 0 and 1
    assert own.control_variance.value(0.9) == pytest.approx(0.5 / 2.0, abs=1e-14)
    assert own.squared_deviation.value(0.9) == pytest.approx(0.25, abs=1e-14)  # d_c
    noise = ((0.25 / 4 + 0.25 / 2) + (0.25 / 2 + 0.25 / 2)) / 2
    assert own.noise.value(0.9) == pytest.approx(noise, abs=1e-14)
    assert own.between_variance(0.9) == pytest.approx(0.25 - noise, abs=1e-14)


def test_second_step_is_weighted_by_decay_and_corrected_for_its_age():
    first = update_statistics(Statistics(), two_task_step())
    second = update_statistics(first, gains_of([[1.0, 1.0]], [[1.0, 1.0]], ["a"]))
    own = second.of("a")
    mean = (0.9 * 0.1 * 0.5 + 0.1 * 0.0) / 0.19
    assert own.steps == 2
    assert own.gain.value(0.9) == pytest.approx(mean, abs=1e-14)
    assert own.replay_variance.value(0.9) == pytest.approx(0.9 * 0.25 / 1.9, abs=1e-14)
    # d_c looks from the mean just updated, and leaves the earlier step's deviations as they were
    assert own.squared_deviation.value(0.9) == pytest.approx((0.9 * 0.25 + mean**2) / 1.9, abs=1e-14)


def test_a_type_absent_from_a_step_keeps_statistics_and_age():
    first = update_statistics(Statistics(), gains_of([[1.0, 0.0]] * 2, [[0.0, 1.0]] * 2, ["a", "b"]))
    second = update_statistics(first, gains_of([[1.0, 1.0]], [[0.0, 1.0]], ["b"]))
    assert second.of("a") == first.of("a")
    assert second.of("b").steps == 2 and second.all_types.steps == 2


def test_excluded_tasks_enter_no_statistic():
    kept = gains_of([[1.0, 0.0]], [[0.0, 1.0]], ["a"])
    more = gains_of([[1.0, 0.0], [1.2, 0.0]], [[0.0, 1.0], [0.0, 1.2]], ["a", "a"], [False, True])
    assert update_statistics(Statistics(), kept) == update_statistics(Statistics(), more)


def test_a_step_of_excluded_tasks_only_changes_nothing():
    first = update_statistics(Statistics(), two_task_step())
    nothing = gains_of([[1.0, 0.0], [1.0]], [[0.0, 1.0], [0.0]], ["a", "c"], [True, True])
    assert update_statistics(first, nothing) == first
    assert np.isnan(shrink(first, nothing).shrunk_gain_Q).all()


def test_single_episodes_add_nothing_to_the_pooled_variance():
    alone = gains_of([[1.0, 0.0, 1.0]], [[0.0, 1.0]], ["a"])
    with_single = gains_of([[1.0, 0.0, 1.0], [0.7]], [[0.0, 1.0], [0.2]], ["a", "a"])
    one = update_statistics(Statistics(), alone).of("a")
    two = update_statistics(Statistics(), with_single).of("a")
    assert one.replay_variance == two.replay_variance and one.control_variance == two.control_variance


def test_a_step_without_degrees_of_freedom_keeps_the_variances():
    first = update_statistics(Statistics(), two_task_step())
    second = update_statistics(first, gains_of([[1.0]], [[0.0]], ["a"]))
    assert second.of("a").replay_variance == first.of("a").replay_variance
    assert second.of("a").gain.steps == 2


def test_deviations_are_averaged_over_the_same_steps_as_the_noise_taken_from_them():
    noiseless = gains_of([[1.0], [0.0]], [[0.0], [0.0]], ["a", "a"])  # gains, yet no variance anywhere
    statistics = update_statistics(Statistics(), noiseless)
    assert statistics.of("a").squared_deviation == MovingAverage() and statistics.of("a").gain.steps == 1
    own = update_statistics(statistics, two_task_step()).of("a")
    assert own.squared_deviation.steps == own.noise.steps == 1 and own.gain.steps == 2


def test_missing_variances_come_from_all_types_then_from_the_other_side():
    step = gains_of([[1.0], [1.0, 0.0]], [[0.0], [0.0]], ["single", "pair"])
    statistics = update_statistics(Statistics(), step)
    shrunk = shrink(update_statistics(statistics, step), step)
    assert shrunk.borrowed_Q.tolist() == [False, False]
    assert shrunk.replay_variance_Q.tolist() == pytest.approx([0.5, 0.5])  # type "single" has none of its own
    assert shrunk.control_variance_Q.tolist() == pytest.approx([0.5, 0.5])  # no control side has any


def test_unknown_noise_shrinks_to_the_type_mean():
    step = gains_of([[1.0], [0.0]], [[0.0], [0.0]], ["a", "a"])
    shrunk = shrink(update_statistics(Statistics(), step), step)
    assert shrunk.shrunk_gain_Q.tolist() == pytest.approx([0.5, 0.5])
    assert np.isnan(shrunk.noise_Q).all() and shrunk.factor_Q.tolist() == [0.0, 0.0]


def test_first_appearance_borrows_all_type_statistics_and_the_second_uses_its_own():
    first = update_statistics(Statistics(), gains_of([[1.0, 1.0]] * 3, [[0.0, 0.0]] * 3, ["a", "a", "a"]))
    step = gains_of([[0.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]], ["new", "a"])
    statistics = update_statistics(first, step)
    shrunk = shrink(statistics, step)
    assert shrunk.borrowed_Q.tolist() == [True, False]
    assert shrunk.type_mean_Q[0] == statistics.all_types.gain.value(0.9) != shrunk.type_mean_Q[1]
    again = update_statistics(statistics, step)
    assert shrink(again, step).type_mean_Q[0] == again.of("new").gain.value(0.9) == pytest.approx(0.0, abs=1e-15)


def test_statistics_survive_a_round_trip_through_rows_exactly():
    statistics = update_statistics(Statistics(), two_task_step())
    statistics = update_statistics(statistics, gains_of([[0.3, 0.1]], [[0.7]], ["b"]), 0.7)
    rows = statistics.as_rows()
    assert [row["task_type"] for row in rows] == ["*", "a", "b"]
    assert all(isinstance(value, (int, float, str)) for row in rows for value in row.values())
    assert Statistics.from_rows(rows[::-1]) == statistics
    assert TypeStatistics.from_row(TypeStatistics().as_row()) == TypeStatistics()


@pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan])
def test_impossible_decay_is_refused(decay):
    with pytest.raises(ConfigError):
        update_statistics(Statistics(), two_task_step(), decay)


step_of_tasks = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.lists(st.sampled_from([0.0, 1.0, 1.1, 1.2]), min_size=0, max_size=4),
        st.lists(st.sampled_from([0.0, 1.0, 1.05]), min_size=0, max_size=4),
    ),
    min_size=1,
    max_size=10,
)


def as_gains(tasks) -> TaskGains:
    return gains_of([task[1] for task in tasks], [task[2] for task in tasks], [task[0] for task in tasks])


@settings(deadline=None)
@given(st.lists(step_of_tasks, min_size=1, max_size=4))
def test_shrunk_gain_lies_between_type_mean_and_gain(steps):
    statistics = Statistics()
    for tasks in steps:
        gains = as_gains(tasks)
        statistics = update_statistics(statistics, gains)
        shrunk = shrink(statistics, gains)
        scored = gains.scored_Q
        low = np.minimum(gains.gain_Q, shrunk.type_mean_Q)[scored]
        high = np.maximum(gains.gain_Q, shrunk.type_mean_Q)[scored]
        assert ((low <= shrunk.shrunk_gain_Q[scored]) & (shrunk.shrunk_gain_Q[scored] <= high)).all()
        assert ((shrunk.factor_Q[scored] >= 0.0) & (shrunk.factor_Q[scored] <= 1.0)).all()
        assert np.isnan(shrunk.shrunk_gain_Q[~scored]).all()


@settings(deadline=None)
@given(step_of_tasks, st.randoms())
def test_statistics_and_shrinkage_do_not_depend_on_task_order(tasks, random):
    order = list(range(len(tasks)))
    random.shuffle(order)
    gains, shuffled = as_gains(tasks), as_gains([tasks[index] for index in order])
    one, two = update_statistics(Statistics(), gains), update_statistics(Statistics(), shuffled)
    assert one == two
    np.testing.assert_array_equal(shrink(one, gains).shrunk_gain_Q[order], shrink(two, shuffled).shrunk_gain_Q)


def test_identical_gains_and_utilities_shrink_to_themselves():
    step = gains_of([[1.0, 1.0]] * 3, [[0.0, 0.0]] * 3, list("aab"))
    shrunk = shrink(update_statistics(Statistics(), step), step)
    assert shrunk.shrunk_gain_Q.tolist() == pytest.approx([1.0] * 3)
    assert shrunk.noise_Q.tolist() == [0.0] * 3


def test_shrinkage_factor_by_hand_and_at_its_edges():
    assert shrinkage_factor(0.1, 0.3) == pytest.approx(0.25)
    assert shrinkage_factor([0.1, 0.0, 0.0], [0.0, 0.0, 0.5]).tolist() == [1.0, 0.0, 0.0]


@settings(deadline=None)
@given(st.floats(1e-6, 2.0), st.floats(1e-6, 2.0), st.floats(1e-6, 2.0))
def test_more_noise_is_believed_less(between, noise, extra):
    assert shrinkage_factor(between, noise + extra) < shrinkage_factor(between, noise)


def test_a_task_with_more_episodes_is_shrunk_less():
    step = gains_of(
        [[1.0, 0.0] * 8, [1.0, 0.0], [1.0] * 4, [0.0] * 4],
        [[0.0, 1.0] * 8, [0.0, 1.0], [0.0] * 4, [1.0] * 4],
        list("aaaa"),
    )
    shrunk = shrink(update_statistics(Statistics(), step), step)
    assert shrunk.factor_Q[0] > shrunk.factor_Q[1] > 0.0


# --- skill reward and trust


def test_trust_by_hand_from_the_method_page():
    assert trust([0.5, 0.05, 0.0, -0.25, -0.5, 9.0, -9.0]).tolist() == [2.0, 1.1, 1.0, 0.5, 0.0, 2.0, 0.0]


def test_trust_is_exactly_one_without_a_gain():
    assert trust([math.nan], slope=3.0, intercept=0.4).tolist() == [1.0]


@settings(deadline=None)
@given(st.lists(finite, min_size=2, max_size=20), st.floats(0.0, 5.0), st.floats(1.0, 4.0))
def test_trust_stays_in_its_bounds_and_never_falls_with_the_gain(gains, slope, ceiling):
    omega = trust(sorted(gains), slope=slope, ceiling=ceiling)
    assert ((omega >= 0.0) & (omega <= ceiling)).all() and (np.diff(omega) >= 0.0).all()


def test_skill_reward_by_hand_raw_shrunk_and_clipped():
    gain, shrunk, mean = [1.0, -3.0, math.nan], [0.4, -0.5, math.nan], [0.2, 0.2, 0.2]
    assert skill_rewards(gain, shrunk, mean).tolist() == pytest.approx([0.8, -2.0, math.nan], nan_ok=True)
    assert skill_rewards(gain, shrunk, mean, "shrunk").tolist() == pytest.approx([0.2, -0.7, math.nan], nan_ok=True)


def test_skill_reward_refuses_an_unknown_source():
    with pytest.raises(ConfigError):
        skill_rewards([0.0], [0.0], [0.0], "half")


@settings(deadline=None)
@given(finite, finite, unit)
def test_shrunk_reward_has_the_sign_of_the_raw_one_and_is_no_larger(gain, mean, factor):
    raw = skill_rewards(gain, 0.0, mean, "raw", limit=10.0)
    small = skill_rewards(gain, shrunk_gain(gain, mean, factor), mean, "shrunk", limit=10.0)
    assert abs(small) <= abs(raw) and small * raw >= 0.0


# --- what the estimators are for


def simulated(win_with: list[float], win_without: float, tasks: int, steps: int, seed: int):
    """The last step's shrunk gains and types of a simulation with one type per entry of `win_with`, K = 4 and 4 controls."""
    rng = np.random.default_rng(seed)
    statistics = Statistics()
    for _ in range(steps):
        type_Q = np.arange(tasks) % len(win_with)
        task_E = np.repeat(np.arange(tasks), 4)
        replay = task_moments(rng.random(4 * tasks) < np.array(win_with)[type_Q][task_E], task_E, tasks)
        control = task_moments(rng.random(4 * tasks) < win_without, task_E, tasks)
        names = tuple(f"type-{code}" for code in range(len(win_with)))
        gains = TaskGains(replay_gains(replay, control), replay, control, type_Q, names)
        statistics = update_statistics(statistics, gains)
    return shrink(statistics, gains).shrunk_gain_Q, type_Q


@pytest.mark.parametrize("seed", range(3))
def test_good_skills_earn_trust_harmful_ones_lose_it_and_useless_ones_leave_it_alone(seed):
    shrunk, type_Q = simulated([0.9, 0.1, 0.5], 0.5, tasks=96, steps=20, seed=seed)
    omega = trust(shrunk)
    assert (omega[type_Q == 0] > 1.3).all() and (omega[type_Q == 1] < 0.7).all()
    assert np.abs(omega[type_Q == 2] - 1.0).mean() < 0.2


def test_shrunk_gain_is_nearer_the_truth_than_raw_gain_and_type_mean():
    path = Path(__file__).parent.parent / "benchmarks" / "shrinkage.py"
    spec = importlib.util.spec_from_file_location("shrinkage_benchmark", path)
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = benchmark  # dataclasses look their module up
    spec.loader.exec_module(benchmark)
    world = benchmark.make_world(6, True, np.random.default_rng(0))
    for replays in (2, 4, 8):
        errors = benchmark.squared_errors(world, 96, 20, replays, np.random.default_rng(replays))
        raw, mean, shrunk = errors.mean(axis=1)
        assert shrunk < min(raw, mean)
