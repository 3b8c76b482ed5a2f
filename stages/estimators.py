"""Gains, shrinkage factors, skill reward and trust of single tasks: method sections 1 (rows 5 to 7) and 2.

Pure numpy in float64: arrays in, arrays out, no files, no configuration object. Inside this module "not scored" is NaN;
the stage that writes tables turns it into null. Every sum is taken in the order of its sorted values, so that no result
depends on the order of the rows, to the last bit. What is carried from step to step lives in `stages.type_statistics`.

Axis suffixes: `_E` episodes, `_Q` tasks of one step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from schemas.errors import ConfigError, NumericsError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def utility(won: ArrayLike, turns: ArrayLike, max_turns: ArrayLike, speed_bonus: float = 0.2) -> FloatArray:
    """Utility u of episodes, `won * (1 + lambda_u * (1 - turns / max_turns))` (method section 1, row 5).

    Shapes `(E,)` or scalars that broadcast; `speed_bonus` is lambda_u. A lost episode has exactly 0, a won one between 1
    and 1 + lambda_u. Raises NumericsError for turns outside 0..max_turns.

    >>> utility([True, True, False], [30, 15, 3], 30).tolist()
    [1.0, 1.1, 0.0]
    """
    turns_E, max_turns_E = np.asarray(turns, np.float64), np.asarray(max_turns, np.float64)
    if np.any(max_turns_E < 1) or np.any(turns_E < 0) or np.any(turns_E > max_turns_E):
        raise NumericsError("turns of an episode out of range", expected="0 <= turns <= max_turns, max_turns >= 1")
    return np.asarray(won, np.float64) * (1.0 + speed_bonus * (1.0 - turns_E / max_turns_E))


def grouped_sums(values: FloatArray, groups: IntArray, group_count: int) -> FloatArray:
    """Sum of `values` `(N,)` in each group, `(group_count,)`; the same bits for any order of the rows.

    >>> grouped_sums(np.array([1.0, 2.0, 4.0]), np.array([0, 2, 0]), 3).tolist()
    [5.0, 0.0, 2.0]
    """
    order = np.lexsort((values, groups))
    return np.bincount(groups[order], weights=values[order], minlength=group_count).astype(np.float64)


@dataclass(frozen=True, slots=True)
class TaskMoments:
    """Utilities of one side (replays or controls) condensed to one entry a task, each `(Q,)`."""

    count_Q: IntArray
    mean_Q: FloatArray  # NaN where the task has no episode
    squared_deviations_Q: FloatArray  # sum of (u - task mean)^2, 0 where count < 2


def task_moments(utility_E: ArrayLike, task_E: ArrayLike, task_count: int) -> TaskMoments:
    """Count, mean and squared deviations of utilities per task; `task_E` holds task indices in 0..task_count - 1.

    Two passes in float64. Raises NumericsError for a utility that is not finite.

    >>> moments = task_moments([1.0, 0.0, 1.0], [0, 0, 2], 3)
    >>> moments.count_Q.tolist(), moments.mean_Q.tolist(), moments.squared_deviations_Q.tolist()
    ([2, 0, 1], [0.5, nan, 1.0], [0.5, 0.0, 0.0])
    """
    values, tasks = np.asarray(utility_E, np.float64), np.asarray(task_E, np.int64)
    if not np.all(np.isfinite(values)):
        raise NumericsError("utility of an episode is not finite", expected="finite", found=float(np.sum(values)))
    count = np.bincount(tasks, minlength=task_count).astype(np.int64)
    sums = grouped_sums(values, tasks, task_count)
    mean = np.divide(sums, count, out=np.full(task_count, np.nan), where=count > 0)
    squared = grouped_sums((values - mean[tasks]) ** 2, tasks, task_count)
    # A mean of equal numbers may be off by one unit in the last place; a constant task has no variance at all.
    return TaskMoments(count, mean, np.where(_constant_groups(values, tasks, task_count), 0.0, squared))


def _constant_groups(values: FloatArray, groups: IntArray, group_count: int) -> NDArray[np.bool_]:
    lowest, highest = np.full(group_count, np.inf), np.full(group_count, -np.inf)
    np.minimum.at(lowest, groups, values)
    np.maximum.at(highest, groups, values)
    return lowest >= highest


def replay_gains(replays: TaskMoments, controls: TaskMoments, excluded_Q: ArrayLike | None = None) -> FloatArray:
    """Replay gain g_q, mean replay utility minus mean control utility, `(Q,)` (method section 1, row 6).

    NaN where a side has no episode or `excluded_Q` is true.

    >>> replay_gains(task_moments([1.0, 1.0], [0, 1], 2), task_moments([0.0, 0.5], [0, 0], 2)).tolist()
    [0.75, nan]
    """
    gain = replays.mean_Q - controls.mean_Q
    return gain if excluded_Q is None else np.where(np.asarray(excluded_Q, bool), np.nan, gain)


def gain_noise(
    replay_variance: ArrayLike, control_variance: ArrayLike, replay_count: ArrayLike, control_count: ArrayLike
) -> FloatArray:
    """Noise of a task's gain, s_q^2 = v_rep / K_q + v_ctl / |C_q| (method section 2), `(Q,)`; NaN for a count of 0.

    >>> gain_noise([0.25], [0.125], [4], [4]).tolist()
    [0.09375]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        noise = np.asarray(replay_variance, np.float64) / np.asarray(replay_count, np.float64)
        noise = noise + np.asarray(control_variance, np.float64) / np.asarray(control_count, np.float64)
    empty = (np.asarray(replay_count) <= 0) | (np.asarray(control_count) <= 0)
    return np.where(empty, np.nan, noise)


def shrinkage_factor(between_variance: ArrayLike, noise: ArrayLike) -> FloatArray:
    """B_q = tau^2 / (tau^2 + s_q^2), in [0, 1]: the share of a deviation that is believed (method section 2).

    B = 1 for s^2 = 0 < tau^2; B = 0 for both 0, and where either is unknown (NaN) [O].

    >>> shrinkage_factor([0.03, 0.03, 0.0, 0.0], [0.09, 0.0, 0.0, float("nan")]).tolist()
    [0.25, 1.0, 0.0, 0.0]
    """
    tau2, noise2 = np.broadcast_arrays(np.asarray(between_variance, np.float64), np.asarray(noise, np.float64))
    total = tau2 + noise2
    usable = np.isfinite(total) & (total > 0.0)
    return np.divide(tau2, total, out=np.zeros(total.shape), where=usable)


def shrunk_gain(gain: ArrayLike, type_mean: ArrayLike, factor: ArrayLike) -> FloatArray:
    """g~_q = m_c + B_q (g_q - m_c), held between m_c and g_q against rounding, `(Q,)`.

    >>> shrunk_gain([0.5], [0.1], [0.25]).tolist()
    [0.2]
    """
    gain_Q, mean_Q = np.asarray(gain, np.float64), np.asarray(type_mean, np.float64)
    shrunk = mean_Q + np.asarray(factor, np.float64) * (gain_Q - mean_Q)
    return np.clip(shrunk, np.minimum(gain_Q, mean_Q), np.maximum(gain_Q, mean_Q))


def skill_rewards(
    gain: ArrayLike, shrunk: ArrayLike, type_mean: ArrayLike, source: str = "raw", limit: float = 2.0
) -> FloatArray:
    """Skill reward r_q, `(Q,)`: g_q - m_c ("raw") or g~_q - m_c ("shrunk"), clipped to +-limit; NaN without a gain.

    >>> skill_rewards([0.5, 3.0], [0.2, 0.4], [0.1, 0.1]).tolist()
    [0.4, 2.0]
    """
    if source not in ("raw", "shrunk"):
        raise ConfigError("unknown source of the skill reward", expected="raw or shrunk", found=source)
    if not limit > 0.0:
        raise ConfigError("clip of the skill reward out of range", expected="> 0", found=limit)
    chosen = np.asarray(gain if source == "raw" else shrunk, np.float64)
    return np.clip(chosen - np.asarray(type_mean, np.float64), -limit, limit)


def trust(shrunk: ArrayLike, slope: float = 2.0, ceiling: float = 2.0, intercept: float = 1.0) -> FloatArray:
    """Trust omega_q = clip(1 + kappa * g~_q, 0, omega_max), `(Q,)`; exactly 1 for a task without a gain (method section 2).

    >>> trust([-0.6, 0.0, 0.05, 0.7, float("nan")]).tolist()
    [0.0, 1.0, 1.1, 2.0, 1.0]
    """
    shrunk_Q = np.asarray(shrunk, np.float64)
    return np.where(np.isnan(shrunk_Q), 1.0, np.clip(intercept + slope * shrunk_Q, 0.0, ceiling))
