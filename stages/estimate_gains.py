"""Stage `estimate-gains`: replay gains, type statistics, shrinkage, skill rewards and trust (method section 2).

Reads `rollouts`, `skills` and `replays` of the step and the latest `type_stats` before it; writes `type_stats` and
`gains`. No model, no environment, no randomness: it can be repeated in seconds, and `audit` repeats it for all steps of a
run with other priors, into another run directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from data.progress import Reporter, SilentReporter
from schemas.artifacts import sha256_json
from schemas.config import GainsSection
from schemas.config_loading import code_version, config_part_sha256
from schemas.errors import ArtifactError
from schemas.run_directory import RunDirectory
from schemas.table_io import finish_step, read_table, rebuild_command, step_manifest, write_part
from stages.gain_tables import EPISODE_COLUMNS, SKILL_COLUMNS, estimate, gain_rows, statistics_rows
from stages.reports import value_counts
from stages.stage import StageResult, Stopwatch, open_stage
from stages.type_statistics import Statistics
from stages.workbench import Workbench

STAGE = "estimate-gains"
TABLES = ("type_stats", "gains")
NO_HASH = "none"


def stage_inputs(run: RunDirectory, step: int, bench: Workbench | None = None) -> dict[str, str]:
    """Hashes of what the stage's output depends on; the bench is not needed."""
    del bench
    earlier = last_statistics_step(run, step)
    statistics = NO_HASH
    if earlier is not None:
        statistics = step_manifest(run, "type_stats", earlier).sha256
    return {
        "rollouts": step_manifest(run, "rollouts", step).sha256,
        "replays": step_manifest(run, "replays", step).sha256,
        "type_stats": statistics,
        "config": config_part_sha256(run.config, "gains", "env.max_turns", "rollout.group_size"),
        "code": code_version(),
    }


def last_statistics_step(run: RunDirectory, step: int) -> int | None:
    """The last step before `step` whose type statistics are finished."""
    return max((done for done in run.finished_steps("type_stats") if done < step), default=None)


def _expect_no_gap(run: RunDirectory, step: int) -> None:
    """Raise ArtifactError when an earlier step was replayed and not estimated: its share of the averages would be lost."""
    estimated = set(run.finished_steps("gains"))
    owed = [done for done in run.finished_steps("replays") if done < step and done not in estimated]
    if owed:
        raise ArtifactError(
            f"the gains of step {step} continue the statistics of step {owed[0]}, which has replays and no gains",
            where=str(run.step_dir("gains", owed[0])),
            remedy=rebuild_command(run, "gains", owed[0]),
        )


def run(
    run: RunDirectory,
    step: int,
    *,
    force: bool = False,
    reporter: Reporter | None = None,
    bench: Workbench | None = None,
) -> StageResult:
    """Estimate and publish the gains of `step`.

    Raises ArtifactError for missing or damaged tables, stale output and an earlier step with replays that has no gains yet.
    """
    del bench  # nothing to build: this stage only reads tables
    reporter = reporter or SilentReporter()
    with run.lock():
        _expect_no_gap(run, step)
        inputs = stage_inputs(run, step)
        if not open_stage(run, STAGE, step, TABLES, inputs, force):
            return StageResult(STAGE, step, "up_to_date", summarise(run, step))
        with Stopwatch(run, step, STAGE):
            reporter.stage(STAGE, None, "tasks")
            earlier = last_statistics_step(run, step)
            previous = Statistics() if earlier is None else read_statistics(run, earlier)
            _publish(run, run, step, previous, inputs)
            summary = summarise(run, step)
            reporter.advance(summary["tasks"], scored=summary["scored"])
            reporter.done()
        return StageResult(STAGE, step, "done", summary)


def _publish(
    source: RunDirectory, target: RunDirectory, step: int, previous: Statistics, inputs: dict[str, str]
) -> Statistics:
    """Compute one step from the tables of `source` and write it to `target`; the statistics after it."""
    config = target.config
    result = estimate(
        read_table(source, "rollouts", step, columns=EPISODE_COLUMNS),
        read_table(source, "replays", step, columns=EPISODE_COLUMNS),
        read_table(source, "skills", step, columns=SKILL_COLUMNS),
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


def read_statistics(run: RunDirectory, step: int) -> Statistics:
    """The statistics after `step`, exactly as they were. Raises ArtifactError when the table is missing or damaged."""
    rows = read_table(run, "type_stats", step, columns=["task_type", "state"]).to_pylist()
    try:
        return Statistics.from_rows([{**json.loads(row["state"]), "task_type": row["task_type"]} for row in rows])
    except (ValueError, KeyError, TypeError) as error:
        where = str(run.step_dir("type_stats", step))
        raise ArtifactError("the state of a type's statistics is damaged", where=where, found=repr(error)) from error


def summarise(run: RunDirectory, step: int) -> dict[str, Any]:
    """Figures of a complete estimate: tasks, scored tasks, mean gain, shrunk gain and trust, reasons without a gain."""
    table = read_table(run, "gains", step, columns=["replay_gain", "shrunk_gain", "trust", "reason"])
    return {
        "tasks": len(table),
        "scored": len(table) - table["replay_gain"].null_count,
        "mean_gain": pc.mean(table["replay_gain"]).as_py(),
        "mean_shrunk_gain": pc.mean(table["shrunk_gain"]).as_py(),
        "mean_trust": pc.mean(table["trust"]).as_py(),
        "without_gain": value_counts(table["reason"]),
    }
