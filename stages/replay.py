"""Stage `replay`: one self-written skill per task, and K episodes of the teacher to check it (method section 1, rows 2 to 4).

Reads checkpoint N - 1 and the step's rollouts; writes `skills`, `replay_turns` and `replays`, part by part, in the parts
of the rollout stage. The teacher is the same weights with the skill in context, and starts from the very state of the
task's rollouts: an episode whose fingerprint differs does not count, and its row says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from data.environments import Observation
from data.progress import Reporter, SilentReporter
from data.seeds import derive_seed
from data.tasks import Task
from schemas.config_loading import code_version, config_part_sha256
from schemas.errors import RsipoError
from schemas.run_directory import RunDirectory
from schemas.table_io import read_parts, read_table, step_manifest
from stages.episode_progress import EpisodeProgress
from stages.evidence import Candidate, choose_evidence
from stages.part_publishing import Rows, check_error_share, chunks, finish_parts, publish_parts
from stages.reports import episode_figures, value_counts
from stages.rollout import PLAYING, episode_id
from stages.stage import StageResult, Stopwatch, open_stage
from stages.workbench import ENVIRONMENT, Workbench, bench_of

if TYPE_CHECKING:
    from stages.engines import GenerationResult
    from stages.episodes import EpisodeRecord

STAGE = "replay"
TABLES = ("skills", "replay_turns", "replays")
NON_FINITE = "non_finite"  # the reason of a skill that was sampled with a log-probability that is not finite
FINGERPRINT = "fingerprint"  # the reason of an episode that started from another state


def stage_inputs(run: RunDirectory, step: int, bench: Workbench) -> dict[str, str]:
    """Hashes of what the stage's output depends on."""
    fields = (*PLAYING, "run.seed", "tasks.per_step", "rollout", "replay.replays", "replay.skill_temperature")
    return {
        "weights": bench.weights_sha256(step - 1),
        ENVIRONMENT: bench.environment_version,
        "rollouts": step_manifest(run, "rollouts", step).sha256,
        "config": config_part_sha256(run.config, *fields, "replay.max_skill_tokens", "replay.min_skill_words"),
        "code": code_version(),
    }


def run(
    run: RunDirectory,
    step: int,
    *,
    force: bool = False,
    reporter: Reporter | None = None,
    bench: Workbench | None = None,
) -> StageResult:
    """Write, parse and check the skills of `step`.

    Raises RsipoError when more than `replay.max_no_skill_share` of the tasks have no usable skill, EnvironmentFault when too
    many episodes ended in an environment error, ArtifactError for missing rollouts or stale output.
    """
    reporter = EpisodeProgress(reporter or SilentReporter())
    with run.lock(), bench_of(run, bench, reporter) as workbench:
        inputs = stage_inputs(run, step, workbench)
        if not open_stage(run, STAGE, step, TABLES, inputs, force, lambda: workbench.model_dir(step - 1)):
            return StageResult(STAGE, step, "up_to_date", summarise(run, step))
        with Stopwatch(run, step, STAGE) as watch:
            groups = _rollout_groups(workbench, step)
            replays = run.config.replay.replays
            reporter.stage(STAGE, len(groups) * replays, "episodes")
            publish_parts(
                run,
                step,
                TABLES,
                inputs=inputs,
                parts=chunks(groups, run.config.rollout.groups_per_part),
                play=lambda part: _check_skills(workbench, step, part, inputs["weights"], reporter, watch),
                units=lambda part: len(part) * replays,
                reporter=reporter,
            )
            reporter.done()
            workbench.note_environment_work(watch, reporter)
        check_error_share(run, step, TABLES, limit=run.config.env.max_error_share, stage=STAGE)
        _check_skill_share(run, step, len(groups))
        finish_parts(run, step, TABLES, kind=STAGE, inputs=inputs, extra={"tasks": len(groups), "replays": replays})
        return StageResult(STAGE, step, "done", summarise(run, step))


@dataclass(frozen=True)
class Group:
    """A task, where its rollouts started, and the episode its skill is to be written from (None: no usable one)."""

    task: Task
    fingerprint: str | None
    evidence: EpisodeRecord | None


def _rollout_groups(bench: Workbench, step: int) -> list[Group]:
    """The step's groups in playing order. Of the turns, only those of the evidence become Python objects."""
    from stages.episodes import episodes_from_tables

    run, tasks = bench.run, bench.tasks_of_step(step)
    rollouts = read_table(run, "rollouts", step)
    by_task: dict[str, list[dict[str, Any]]] = {task.task_id: [] for task in tasks}
    columns = ["episode_id", "task_id", "index", "won", "turns", "invalid_turns", "fingerprint"]
    for row in rollouts.select(columns).to_pylist():
        by_task[row["task_id"]].append(row)
    chosen = {name: evidence_episode(rows, run.config.rollout.group_size) for name, rows in by_task.items()}
    wanted = pa.array([episode for episode in chosen.values() if episode is not None], pa.large_string())
    turns = read_table(run, "rollout_turns", step)
    records = episodes_from_tables(
        rollouts.filter(pc.is_in(rollouts["episode_id"], value_set=wanted)),
        turns.filter(pc.is_in(turns["episode_id"], value_set=wanted)),
        {task.task_id: task for task in tasks},
    )
    evidence = {record.job.episode_id: record for record in records}
    return [
        Group(
            task,
            start_fingerprint([row["fingerprint"] for row in by_task[task.task_id]]),
            evidence.get(chosen[task.task_id] or ""),
        )
        for task in tasks
    ]


def evidence_episode(rollouts: Sequence[Mapping[str, Any]], group_size: int) -> str | None:
    """Id of the rollout that a task's skill is written from; `rollouts` are the task's rows."""
    candidates = [
        Candidate(row["index"], row["won"], row["turns"], row["turns"] - row["invalid_turns"]) for row in rollouts
    ]
    index = choose_evidence(candidates, group_size)
    return next((str(row["episode_id"]) for row in rollouts if row["index"] == index), None)


def _check_skills(
    bench: Workbench, step: int, groups: Sequence[Group], weights_sha256: str, reporter: Reporter, watch: Stopwatch
) -> dict[str, Rows]:
    """The rows of one part: a skill for each of its tasks, then all teacher episodes of the tasks that have one."""
    skills = _write_skills(bench, step, groups, weights_sha256)
    records = _replay(bench, step, groups, skills, reporter)
    without = sum(row["skill"] is None for row in skills)
    reporter.advance(without * bench.config.replay.replays)
    turns = [row for record in records for row in record.turn_rows(step)]
    sampled = sum(len(row["token_ids"]) for row in turns) + sum(len(row["token_ids"]) for row in skills)
    watch.add("sampled_tokens", sampled)
    return {
        "skills": skills,
        "replay_turns": turns,
        "replays": [record.episode_row(step, weights_sha256) for record in records],
    }


def _write_skills(bench: Workbench, step: int, groups: Sequence[Group], weights_sha256: str) -> Rows:
    """One row per task: the skill, or the reason why there is none."""
    from stages.engines import GenerationRequest

    config = bench.config
    prompts = {
        group.task.task_id: _skill_prompt(bench, step, group.evidence) for group in groups if group.evidence is not None
    }
    room = bench.context_tokens(bench.model_dir(step - 1)) - config.replay.max_skill_tokens
    requested = [group.task for group in groups if 0 < len(prompts.get(group.task.task_id, ())) <= room]
    requests = [
        GenerationRequest(
            prompt_ids=prompts[task.task_id],
            max_new_tokens=config.replay.max_skill_tokens,
            seed=_skill_seed(config.run.seed, step, task),
            temperature=config.replay.skill_temperature,
        )
        for task in requested
    ]
    results = bench.engine(step - 1).generate(requests) if requests else []
    written = {task.task_id: result for task, result in zip(requested, results, strict=True)}
    return [
        _skill_row(
            bench,
            step,
            group,
            prompts.get(group.task.task_id, []),
            written.get(group.task.task_id),
            weights_sha256,
        )
        for group in groups
    ]


def _skill_prompt(bench: Workbench, step: int, evidence: EpisodeRecord) -> list[int]:
    """The request for a skill from one finished episode."""
    final = evidence.final_observation or Observation("")
    return bench.renderer(step - 1).skill_request_ids(evidence.job.task, evidence.turns, final, bool(evidence.won))


def _skill_seed(seed: int, step: int, task: Task) -> int:
    return derive_seed(seed, "skill", step, task.task_id)


def _skill_row(
    bench: Workbench,
    step: int,
    group: Group,
    prompt: list[int],
    result: GenerationResult | None,
    weights_sha256: str,
) -> dict[str, Any]:
    """One row of `skills`; `reason` is set exactly where `skill` is null."""
    from stages.skill_writing import parse_skill

    config, task, evidence = bench.config.replay, group.task, group.evidence
    row: dict[str, Any] = {
        "step": step,
        "skill_id": f"s-{step:05d}-{task.sha256[:12]}",
        "task_id": task.task_id,
        "task_type": task.task_type,
        "source_episode_id": None if evidence is None else evidence.job.episode_id,
        "source_won": None if evidence is None else evidence.won,
        "prompt_token_ids": prompt,
        "token_ids": [],
        "behaviour_logprobs": [],
        "temperature": config.skill_temperature,
        "text": "",
        "summary": None,
        "skill": None,
        "reason": "no_evidence" if evidence is None else "context",
        "stop_reason": None,
        "seed": _skill_seed(bench.config.run.seed, step, task),
        "weights_sha256": weights_sha256,
    }
    if result is None:
        return row
    if not all(math.isfinite(logprob) for logprob in result.logprobs):
        return row | {"reason": NON_FINITE}  # like an episode's, such a reply is left out of the record
    text = bench.renderer(step - 1).decode(result.token_ids)
    parsed = parse_skill(text, cut=result.stop_reason == "length", min_words=config.min_skill_words)
    return row | {
        "token_ids": list(result.token_ids),
        "behaviour_logprobs": list(result.logprobs),
        "text": text,
        "summary": parsed.summary,
        "skill": parsed.skill,
        "reason": parsed.reason,
        "stop_reason": result.stop_reason,
    }


def _replay(
    bench: Workbench, step: int, groups: Sequence[Group], skills: Rows, reporter: Reporter
) -> list[EpisodeRecord]:
    """K teacher episodes of every task with a skill; those that began elsewhere are marked as not counting."""
    from stages.episodes import EpisodeJob, play

    config = bench.config
    skill_of = {row["task_id"]: row for row in skills if row["skill"] is not None}
    jobs = [
        EpisodeJob(
            task=group.task,
            index=index,
            seed=derive_seed(config.run.seed, STAGE, step, group.task.task_id, index),
            skill=skill_of[group.task.task_id]["skill"],
            skill_id=skill_of[group.task.task_id]["skill_id"],
            episode_id=episode_id("p", step, group.task, index),
        )
        for group in groups
        if group.task.task_id in skill_of
        for index in range(config.replay.replays)
    ]
    if not jobs:
        return []
    records = play(
        bench.engine(step - 1),
        bench.environment,
        bench.renderer(step - 1),
        jobs,
        limits=bench.limits,
        temperature=config.rollout.temperature,
        reporter=reporter,
        batch_episodes=None,
    )
    return exclude_other_starts(records, {group.task.task_id: group.fingerprint for group in groups})


def start_fingerprint(fingerprints: Sequence[str | None]) -> str | None:
    """The fingerprint that all of a task's started rollouts share; None when they disagree or none started.

    >>> start_fingerprint(["a", None, "a"]), start_fingerprint(["a", "b"])
    ('a', None)
    """
    found = {fingerprint for fingerprint in fingerprints if fingerprint is not None}
    return found.pop() if len(found) == 1 else None


def exclude_other_starts(records: Sequence[EpisodeRecord], starts: Mapping[str, str | None]) -> list[EpisodeRecord]:
    """The records, with `won` null and an error on every episode that began from another state than the rollouts did."""
    checked = []
    for record in records:
        expected = starts[record.job.task.task_id]
        if record.fingerprint is not None and record.fingerprint != expected:
            error = f"{FINGERPRINT}: expected {str(expected)[:12]}, found {record.fingerprint[:12]}"
            record = replace(record, won=None, error=error)
        checked.append(record)
    return checked


def _check_skill_share(run: RunDirectory, step: int, tasks: int) -> None:
    """Compare the share of tasks without a usable skill with its limit."""
    counts = value_counts(read_parts(run, "skills", step, columns=["reason"])["reason"])
    missing, limit = sum(counts.values()), run.config.replay.max_no_skill_share
    if missing > limit * tasks:
        raise RsipoError(
            "too many tasks have no usable skill",
            where="replay.max_no_skill_share",
            expected=f"at most {limit:.0%}",
            found=f"{missing} of {tasks} ({', '.join(f'{count} {reason}' for reason, count in counts.items())})",
            remedy="teach the model to write skills with rsipo sft-skills, or raise the limit",
        )


def summarise(run: RunDirectory, step: int) -> dict[str, Any]:
    """Figures of a complete replay stage: those of the episodes, skills and why some are missing, other start states."""
    columns = ["won", "turns", "invalid_turns", "stop_reason", "sampled_tokens"]
    figures = episode_figures(read_table(run, "replays", step, columns=columns))
    skills = read_table(run, "skills", step, columns=["skill", "reason"])
    errors = read_table(run, "replays", step, columns=["error"])["error"]
    mismatched = pc.sum(pc.starts_with(errors, FINGERPRINT)).as_py() or 0
    return figures | {
        "skills": len(skills) - skills["skill"].null_count,
        "tasks": len(skills),
        "no_skill": value_counts(skills["reason"]),
        "fingerprint_mismatches": int(mismatched),
    }
