"""Stage `estimate-gains`: replay gains, type statistics, shrinkage, skill rewards and trust (method section 2).

Reads `rollouts`, `skills` and `replays` of the step and the latest `type_stats` before it; writes `type_stats` and
`gains`. No model, no environment, no randomness: it can be repeated in seconds, and `audit` repeats it for all steps of a
run with other priors, into another run directory.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.artifacts import read_manifest, sha256_json
from schemas.config import GainsSection
from schemas.config_loading import code_version, config_part_sha256
from schemas.errors import ArtifactError
from schemas.run_directory import RunDirectory
from schemas.table_io import finish_step, read_table, write_part
from stages.estimators import replay_gains, skill_rewards, task_moments, trust, utility
from stages.evidence import evidence_count
from stages.stage import Reporter, SilentReporter, StageResult, Stopwatch, open_stage
from stages.type_statistics import (
    ALL_TYPES,
    ShrunkGains,
    Statistics,
    TaskGains,
    TypeStatistics,
    shrink,
    update_statistics,
)
from stages.workbench import Workbench

STAGE = "estimate-gains"
TABLES = ("type_stats", "gains")
NO_HASH = "none"

EPISODE_COLUMNS = ("task_id", "task_type", "index", "fingerprint", "won", "turns", "weights_sha256")
SKILL_COLUMNS = ("task_id", "skill_id", "skill", "reason")


def stage_inputs(run: RunDirectory, step: int, bench: Workbench | None = None) -> dict[str, str]:
    """Hashes of what the stage's output depends on; the bench is not needed."""
    del bench
    earlier = last_statistics_step(run, step)
    statistics = NO_HASH
    if earlier is not None:
        statistics = read_manifest(run.step_dir("type_stats", earlier), verify=False).sha256
    return {
        "rollouts": read_manifest(run.step_dir("rollouts", step), verify=False).sha256,
        "replays": read_manifest(run.step_dir("replays", step), verify=False).sha256,
        "type_stats": statistics,
        "config": config_part_sha256(run.config, "gains", "env.max_turns", "rollout.group_size"),
        "code": code_version(),
    }


def last_statistics_step(run: RunDirectory, step: int) -> int | None:
    """The last step before `step` whose type statistics are finished."""
    return max((done for done in run.finished_steps("type_stats") if done < step), default=None)


def run(
    run: RunDirectory,
    step: int,
    *,
    force: bool = False,
    reporter: Reporter | None = None,
    bench: Workbench | None = None,
) -> StageResult:
    """Estimate and publish the gains of `step`. Raises ArtifactError for missing or damaged tables and stale output."""
    del bench  # nothing to build: this stage only reads tables
    reporter = reporter or SilentReporter()
    with run.lock():
        inputs = stage_inputs(run, step)
        if not open_stage(run, STAGE, step, TABLES, inputs, force):
            return StageResult(STAGE, step, "up_to_date", summarise(run, step))
        with Stopwatch(run, step, STAGE):
            reporter.stage(STAGE, None, "tasks")
            earlier = last_statistics_step(run, step)
            previous = Statistics() if earlier is None else read_statistics(run, earlier)
            _publish(run, run, step, previous, inputs)
            reporter.done()
        return StageResult(STAGE, step, "done", summarise(run, step))


def _publish(
    source: RunDirectory, target: RunDirectory, step: int, previous: Statistics, inputs: dict[str, str]
) -> Statistics:
    """Compute one step from the tables of `source` and write it to `target`; the statistics after it."""
    config = target.config
    episodes = [
        read_table(source, "rollouts", step, columns=EPISODE_COLUMNS),
        read_table(source, "replays", step, columns=EPISODE_COLUMNS),
    ]
    skills = read_table(source, "skills", step, columns=SKILL_COLUMNS)
    result = estimate(
        *episodes,
        skills,
        previous,
        settings=config.gains,
        max_turns=source.config.env.max_turns,
        group_size=source.config.rollout.group_size,
    )
    rows = {
        "type_stats": statistics_rows(step, result.statistics, config.gains.decay),
        "gains": gain_rows(step, result, config.gains),
    }
    write_part(target, step, 0, rows, sha256_json(inputs))
    finish_step(target, TABLES, step, kind=STAGE, inputs=inputs, extra={"tasks": len(result.task_ids)})
    return result.statistics


def audit(
    run: RunDirectory, steps: list[int] | None, gains: GainsSection, out: Path, *, reporter: Reporter | None = None
) -> RunDirectory:
    """Estimate the gains of `steps` (default: every step with replays) again with the priors `gains`, into `out`.

    The statistics start empty at the first of the steps, since moving averages of another decay cannot be continued.
    `out` becomes a run directory of its own with tables `gains` and `type_stats`; the run is only read.
    """
    reporter = reporter or SilentReporter()
    chosen = sorted(steps if steps is not None else run.finished_steps("replays"))
    if not chosen:
        raise ArtifactError(
            "there is no step with replays to audit", where=str(run.root), remedy="run rsipo replay first"
        )
    target = RunDirectory.create(out, run.config.model_copy(update={"gains": gains}))
    if target.root == run.root:
        raise ArtifactError("an audit must not write into its run", where=str(out), remedy="choose another --out")
    statistics = Statistics()
    reporter.stage(STAGE, len(chosen), "steps")
    with target.lock():
        for step in chosen:
            inputs = stage_inputs(run, step) | {
                "type_stats": sha256_json(statistics.as_rows()),
                "config": config_part_sha256(target.config, "gains", "env.max_turns", "rollout.group_size"),
            }
            if open_stage(target, STAGE, step, TABLES, inputs, True):
                statistics = _publish(run, target, step, statistics, inputs)
            else:
                statistics = read_statistics(target, step)
            reporter.advance(1, step=step)
    reporter.done()
    return target


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
    type_Q, type_names = _type_codes(task_types)
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


def _type_codes(task_types: list[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    names = tuple(sorted(set(task_types)))
    code = {name: number for number, name in enumerate(names)}
    return np.array([code[name] for name in task_types], np.int64), names


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
) -> Any:
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
    omega = trust(shrunk.shrunk_gain_Q, settings.trust_slope, settings.trust_max)
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


def read_statistics(run: RunDirectory, step: int) -> Statistics:
    """The statistics after `step`, exactly as they were. Raises ArtifactError when the table is missing or damaged."""
    rows = read_table(run, "type_stats", step, columns=["task_type", "state"]).to_pylist()
    try:
        found = {row["task_type"]: TypeStatistics.from_row(json.loads(row["state"])) for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        where = str(run.step_dir("type_stats", step))
        raise ArtifactError("the state of a type's statistics is damaged", where=where, found=repr(error)) from error
    return Statistics(all_types=found.pop(ALL_TYPES, TypeStatistics()), by_type=found)


def summarise(run: RunDirectory, step: int) -> dict[str, Any]:
    """Figures of a complete estimate: tasks, scored tasks, mean gain, shrunk gain and trust, reasons without a gain."""
    from stages.reports import value_counts

    table = read_table(run, "gains", step, columns=["replay_gain", "shrunk_gain", "trust", "reason"])
    return {
        "tasks": len(table),
        "scored": len(table) - table["replay_gain"].null_count,
        "mean_gain": pc.mean(table["replay_gain"]).as_py(),
        "mean_shrunk_gain": pc.mean(table["shrunk_gain"]).as_py(),
        "mean_trust": pc.mean(table["trust"]).as_py(),
        "without_gain": value_counts(table["reason"]),
    }
