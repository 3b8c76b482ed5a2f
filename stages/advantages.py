"""Rewards and group-relative advantages of student rollouts: method section 3, GRPO.

Pure numpy in float64. A group is the rollouts of one task in one step; every rollout has one vote unless
`group_stats="rows"` asks for SEED's weighting by turns. Results do not depend on the order of the rows, to the last bit.
Axis suffixes: `_R` rollouts, `_Q` groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from schemas.errors import ConfigError, NumericsError
from stages.estimators import FloatArray, IntArray, grouped_sums

# A spread of rewards below this share of their size is rounding, not information.
RELATIVE_SPREAD_FLOOR = 1e-9


def episode_rewards(
    score: ArrayLike, invalid_turns: ArrayLike, success_reward: float = 10.0, invalid_penalty: float = 0.1
) -> FloatArray:
    """Reward of each rollout, `success_reward * score - invalid_penalty * invalid_turns`, `(R,)`.

    `score` is won (0 or 1) or an exact-match score. Raises NumericsError for a reward that is not finite.

    >>> episode_rewards([1, 0], [0, 2]).tolist()
    [10.0, -0.2]
    """
    reward = success_reward * np.asarray(score, np.float64) - invalid_penalty * np.asarray(invalid_turns, np.float64)
    if not np.all(np.isfinite(reward)):
        raise NumericsError("reward of a rollout is not finite", expected="finite score and invalid turns")
    return reward


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages of the rollouts and the group statistics they come from."""

    advantage_R: FloatArray
    mean_Q: FloatArray
    std_Q: FloatArray  # ddof = 1; exactly 0 for a group without spread
    size_Q: IntArray  # rollouts
    zero_variance_Q: NDArray[np.bool_]


def group_advantages(
    reward: ArrayLike,
    group: ArrayLike,
    *,
    norm: str = "std",
    group_stats: str = "rollouts",
    turns: ArrayLike | None = None,
    eps: float = 1e-6,
) -> GroupAdvantages:
    """A_i = (R_i - mean) / (std + eps) within each group; `norm="none"` leaves the division out.

    `reward` `(R,)`; `group` `(R,)` holds indices 0..Q - 1, none empty. `group_stats="rows"` counts a rollout once for each
    of its `turns` `(R,)`. A group without spread gives exactly 0. Raises ConfigError for an unknown option and
    NumericsError for a group of one rollout, which would be its own baseline.

    >>> group_advantages([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], eps=0.0).advantage_R.tolist()  # mean 1/4, std 1/2
    [1.5, -0.5, -0.5, -0.5]
    """
    if norm not in ("std", "none"):
        raise ConfigError("unknown normalisation of advantages", expected="std or none", found=norm)
    reward_R, group_R = np.asarray(reward, np.float64), np.asarray(group, np.int64)
    if not np.all(np.isfinite(reward_R)):
        raise NumericsError("reward of a rollout is not finite", expected="finite", found="NaN or infinity")
    size_Q = np.bincount(group_R).astype(np.int64)
    if np.any(size_Q < 2):
        small = int(np.flatnonzero(size_Q < 2)[0])
        raise NumericsError(
            "a group needs at least two rollouts for a baseline",
            where=f"group {small}",
            expected=">= 2 rollouts",
            found=int(size_Q[small]),
            remedy="raise rollout.group_size, or check that rollouts are grouped by task",
        )
    weight_R = _votes(group_stats, turns, reward_R)
    votes_Q = np.bincount(group_R, weights=weight_R)
    mean_Q = grouped_sums(weight_R * reward_R, group_R, len(size_Q)) / votes_Q
    centred_R = reward_R - mean_Q[group_R]
    variance_Q = grouped_sums(weight_R * centred_R**2, group_R, len(size_Q)) / (votes_Q - 1.0)
    flat_Q = _without_spread(reward_R, group_R, len(size_Q))
    std_Q = np.where(flat_Q, 0.0, np.sqrt(variance_Q))
    scale_Q = std_Q + eps if norm == "std" else np.ones_like(std_Q)
    scale_Q = np.where(flat_Q, 1.0, scale_Q)
    advantage_R = np.where(flat_Q[group_R], 0.0, centred_R / scale_Q[group_R])
    return GroupAdvantages(advantage_R, mean_Q, std_Q, size_Q, flat_Q)


def _votes(group_stats: str, turns: ArrayLike | None, reward_R: FloatArray) -> FloatArray:
    if group_stats == "rollouts":
        return np.ones_like(reward_R)
    if group_stats != "rows" or turns is None:
        raise ConfigError(
            "unknown weighting of the group statistics", expected="rollouts, or rows with turns", found=group_stats
        )
    turns_R = np.asarray(turns, np.float64)
    if turns_R.shape != reward_R.shape or np.any(turns_R < 1):
        raise NumericsError("turns must give every rollout at least one", expected=f"{reward_R.shape}, >= 1")
    return turns_R


def _without_spread(reward_R: FloatArray, group_R: IntArray, group_count: int) -> NDArray[np.bool_]:
    lowest, highest = np.full(group_count, np.inf), np.full(group_count, -np.inf)
    np.minimum.at(lowest, group_R, reward_R)
    np.maximum.at(highest, group_R, reward_R)
    size = np.maximum(1.0, np.maximum(np.abs(lowest), np.abs(highest)))
    return highest - lowest <= RELATIVE_SPREAD_FLOOR * size
