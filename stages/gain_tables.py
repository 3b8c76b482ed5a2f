"""From the tables of a step to gains, shrinkage and trust: the columns in, the estimates and their rows out. Pure.

Controls are the rollouts of the control half that count; replays count when they started where the rollouts did. The
estimators themselves are in `stages.estimators` and `stages.type_statistics`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.config import GainsSection
from schemas.errors import ArtifactError
from stages.estimators import TaskMoments, replay_gains, skill_rewards, task_moments, trust, utility
from stages.evidence import evidence_count
from stages.type_statistics import (
    ALL_TYPES,
    ShrunkGains,
    Statistics,
    TaskGains,
    encode_types,
    shrink,
    update_statistics,
)

EPISODE_COLUMNS = ("task_id", "task_type", "index", "fingerprint", "won", "turns")
SKILL_COLUMNS = ("task_id", "skill_id", "skill", "reason")


@dataclass(frozen=True)
class StepGains:
    """Everything estimated for the tasks of one step, all `(Q,)` in the order in which the tasks were played."""

    task_ids: list[str]
    task_types: list[str]
    skill_ids: list[str | None]
    reasons: list[str | None]  # why the gain is null
    gains: TaskGains
    shrunk: ShrunkGains
    statistics: Statistics  # after this step


def estimate(
    rollouts: pa.Table,
    replays: pa.Table,
    skills: pa.Table,
    previous: Statistics,
    *,
    settings: GainsSection,
    max_turns: int,
    group_size: int,
) -> StepGains:
    """Pure: tables in (columns `EPISODE_COLUMNS`, `SKILL_COLUMNS`), estimates out; every task of `rollouts` gets an entry.

    Controls are the rollouts of the control half that count; replays count when they started where the rollouts did.
    """
    encoded = pc.dictionary_encode(rollouts["task_id"].combine_chunks())
    task_ids = encoded.dictionary.to_pylist()
    task_of_rollout = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    task_types = _first_of_each(task_of_rollout, rollouts["task_type"], len(task_ids))
    start_Q = _start_fingerprints(task_of_rollout, rollouts, len(task_ids))

    is_control = rollouts["index"].to_numpy() >= evidence_count(group_size)
    counted = is_control & _known(rollouts["won"])
    controls = _moments(rollouts, task_of_rollout, counted, len(task_ids), settings.speed_bonus, max_turns)

    task_of_replay = _codes(replays["task_id"], encoded.dictionary, "replays")
    started_elsewhere = _differs(replays["fingerprint"], start_Q, task_of_replay)
    counted = _known(replays["won"]) & ~started_elsewhere
    checks = _moments(replays, task_of_replay, counted, len(task_ids), settings.speed_bonus, max_turns)

    skill_ids, skill_reasons = _skills_of(skills, encoded.dictionary)
    mismatches_Q = np.bincount(task_of_replay[started_elsewhere], minlength=len(task_ids))
    reasons = [
        _reason(skill_reasons[q], int(controls.count_Q[q]), int(checks.count_Q[q]), int(mismatches_Q[q]))
        for q in range(len(task_ids))
    ]
    type_Q, type_names = encode_types(task_types)
    without = np.array([reason is not None for reason in reasons], bool)
    gains = TaskGains(replay_gains(checks, controls, without), checks, controls, type_Q, type_names)
    statistics = update_statistics(previous, gains, settings.decay)
    shrunk = shrink(statistics, gains, settings.decay)
    return StepGains(task_ids, task_types, skill_ids, reasons, gains, shrunk, statistics)


def _reason(skill_reason: str | None, controls: int, replays: int, mismatches: int) -> str | None:
    """Why a task has no gain; the first cause in the order of the stages."""
    if skill_reason is not None:
        return skill_reason
    if controls == 0:
        return "no_control"
    if replays == 0:
        return "fingerprint" if mismatches else "no_replay"
    return None


def _first_of_each(codes: np.ndarray, values: pa.ChunkedArray, count: int) -> list[str]:
    first = np.full(count, len(codes), np.int64)
    np.minimum.at(first, codes, np.arange(len(codes)))
    return list(values.combine_chunks().take(pa.array(first)).to_pylist())


def _known(values: pa.ChunkedArray) -> np.ndarray:
    return pc.is_valid(values).to_numpy()


def _codes(task_ids: pa.ChunkedArray, dictionary: pa.Array, table: str) -> np.ndarray:
    """Positions of task ids in the rollouts' tasks. Raises ArtifactError for a task without rollouts."""
    codes = pc.index_in(task_ids.combine_chunks(), value_set=dictionary)
    if codes.null_count:
        first = codes.is_null().index(True).as_py()
        raise ArtifactError("a task of the table has no rollouts", where=table, found=task_ids[first].as_py())
    return codes.to_numpy(zero_copy_only=False).astype(np.int64)


def _fingerprint_codes(values: pa.ChunkedArray, dictionary: pa.Array) -> np.ndarray:
    """Numbers of fingerprints; -1 for null, -2 for one that `dictionary` lacks."""
    column = values.combine_chunks()
    codes = pc.fill_null(pc.index_in(column, value_set=dictionary), -2).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.where(_known(values), codes, -1)


@dataclass(frozen=True)
class _Starts:
    """Per task the number of the one fingerprint of its started rollouts; -3 where they disagree or none started."""

    code_Q: np.ndarray
    dictionary: pa.Array


def _start_fingerprints(task_of_rollout: np.ndarray, rollouts: pa.Table, count: int) -> _Starts:
    dictionary = pc.unique(rollouts["fingerprint"]).drop_null()
    codes = _fingerprint_codes(rollouts["fingerprint"], dictionary)
    started = codes >= 0
    low, high = np.full(count, np.iinfo(np.int64).max), np.full(count, -1, np.int64)
    np.minimum.at(low, task_of_rollout[started], codes[started])
    np.maximum.at(high, task_of_rollout[started], codes[started])
    return _Starts(np.where(low == high, low, -3), dictionary)


def _differs(fingerprints: pa.ChunkedArray, starts: _Starts, task_of_episode: np.ndarray) -> np.ndarray:
    codes = _fingerprint_codes(fingerprints, starts.dictionary)
    return (codes != -1) & (codes != starts.code_Q[task_of_episode])


def _moments(
    episodes: pa.Table, task_of_episode: np.ndarray, counted: np.ndarray, tasks: int, speed_bonus: float, max_turns: int
) -> TaskMoments:
    won = pc.fill_null(episodes["won"], False).to_numpy().astype(np.float64)[counted]
    turns = episodes["turns"].to_numpy()[counted]
    return task_moments(utility(won, turns, max_turns, speed_bonus), task_of_episode[counted], tasks)


def _skills_of(skills: pa.Table, dictionary: pa.Array) -> tuple[list[str | None], list[str | None]]:
    """Skill id and reason of each task; a task without a row has the reason `no_skill`."""
    position = pc.fill_null(pc.index_in(dictionary, value_set=skills["task_id"].combine_chunks()), -1).to_pylist()
    ids, texts, reasons = (skills[name].to_pylist() for name in ("skill_id", "skill", "reason"))
    skill_ids = [ids[row] if row >= 0 else None for row in position]
    found = [
        ("no_skill" if row < 0 else None if texts[row] is not None else reasons[row] or "no_skill") for row in position
    ]
    return skill_ids, found


def gain_rows(step: int, result: StepGains, settings: GainsSection) -> list[dict[str, Any]]:
    """Rows of `gains`; NaN of the estimators becomes null."""
    gains, shrunk = result.gains, result.shrunk
    reward = skill_rewards(
        gains.gain_Q, shrunk.shrunk_gain_Q, shrunk.type_mean_Q, settings.skill_reward, settings.skill_reward_clip
    )
    omega = trust(shrunk.shrunk_gain_Q, settings.trust_slope, settings.trust_max, settings.trust_intercept)
    columns = {
        "control_utility": gains.controls.mean_Q,
        "replay_utility": gains.replays.mean_Q,
        "replay_gain": gains.gain_Q,
        "noise_variance": shrunk.noise_Q,
        "shrinkage": shrunk.factor_Q,
        "shrunk_gain": shrunk.shrunk_gain_Q,
        "skill_reward": reward,
        "trust": omega,
    }
    values = {name: _nullable(column) for name, column in columns.items()}
    return [
        {
            "step": step,
            "task_id": result.task_ids[q],
            "task_type": result.task_types[q],
            "skill_id": result.skill_ids[q],
            "controls": int(gains.controls.count_Q[q]),
            "replays": int(gains.replays.count_Q[q]),
            "reason": result.reasons[q],
        }
        | {name: column[q] for name, column in values.items()}
        for q in range(len(result.task_ids))
    ]


def _nullable(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def statistics_rows(step: int, statistics: Statistics, decay: float) -> list[dict[str, Any]]:
    """Rows of `type_stats`, the all-type row first; `state` restores the accumulators to the last bit."""
    entries = [(ALL_TYPES, statistics.all_types), *sorted(statistics.by_type.items())]
    return [
        {
            "step": step,
            "task_type": name,
            "steps_seen": entry.steps,
            "state": json.dumps(entry.as_row(), sort_keys=True),
        }
        | {
            column: None if math.isnan(value) else value
            for column, value in {
                "mean_gain": entry.gain.value(decay),
                "replay_variance": entry.replay_variance.value(decay),
                "control_variance": entry.control_variance.value(decay),
                "gain_variance": entry.squared_deviation.value(decay),
                "between_variance": entry.between_variance(decay),
            }.items()
        }
        for name, entry in entries
    ]
