"""Stage `rollout`: the student plays G episodes of every task of the step, no skill in its context (method section 1, row 1).

Reads checkpoint N - 1 and the training panel; writes `rollout_turns` and `rollouts`, part by part. A part is a fixed
number of whole task groups (`rollout.groups_per_part`). Every draw comes from (run seed, step, task, index, turn).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data.progress import Reporter, SilentReporter
from data.seeds import derive_seed
from data.tasks import Task
from schemas.config_loading import code_version, config_part_sha256
from schemas.run_directory import RunDirectory
from schemas.table_io import read_table
from stages.episode_progress import EpisodeProgress
from stages.panels import TRAIN
from stages.part_publishing import Rows, check_error_share, chunks, finish_parts, publish_parts
from stages.reports import episode_figures
from stages.stage import StageResult, Stopwatch, open_stage
from stages.workbench import ENVIRONMENT, Workbench, bench_of

STAGE = "rollout"
TABLES = ("rollout_turns", "rollouts")

# Everything in the configuration that can change what an episode of the student holds.
PLAYING = ("env.name", "env.options", "env.max_turns", "prompt", "engine", "model.dtype")


def stage_inputs(run: RunDirectory, step: int, bench: Workbench) -> dict[str, str]:
    """Hashes of what the stage's output depends on."""
    fields = (*PLAYING, "run.seed", "tasks.per_step", "rollout")
    # The environment first, the weights last: what is configured wrongly is found before checkpoint 0 is made.
    return {
        ENVIRONMENT: bench.environment_version,
        "panel": bench.panel_sha256(TRAIN),
        "weights": bench.weights_sha256(step - 1),
        "config": config_part_sha256(run.config, *fields),
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
    """Play and publish the student episodes of `step`.

    Raises EnvironmentFault when more than `env.max_error_share` of the episodes ended in an environment error, and
    ArtifactError when the output is stale and `force` is not given.
    """
    reporter = EpisodeProgress(reporter or SilentReporter())
    with run.lock(), bench_of(run, bench, reporter) as workbench:
        inputs = stage_inputs(run, step, workbench)
        if not open_stage(run, STAGE, step, TABLES, inputs, force, lambda: workbench.model_dir(step - 1)):
            return StageResult(STAGE, step, "up_to_date", summarise(run, step))
        with Stopwatch(run, step, STAGE) as watch:
            tasks = workbench.tasks_of_step(step)
            group = run.config.rollout.group_size
            reporter.stage(STAGE, len(tasks) * group, "episodes")
            workbench.note_environment_change(TRAIN, reporter)
            publish_parts(
                run,
                step,
                TABLES,
                inputs=inputs,
                parts=chunks(tasks, run.config.rollout.groups_per_part),
                play=lambda part: _play_groups(workbench, step, part, inputs["weights"], reporter, watch),
                units=lambda part: len(part) * group,
                reporter=reporter,
            )
            reporter.done()
            workbench.note_environment_work(watch, reporter)
        check_error_share(run, step, TABLES, limit=run.config.env.max_error_share, stage=STAGE)
        finish_parts(run, step, TABLES, kind=STAGE, inputs=inputs, extra={"tasks": len(tasks), "group_size": group})
        return StageResult(STAGE, step, "done", summarise(run, step))


def _play_groups(
    bench: Workbench, step: int, tasks: Sequence[Task], weights_sha256: str, reporter: Reporter, watch: Stopwatch
) -> dict[str, Rows]:
    """The rows of one part: all G episodes of its tasks, played together."""
    from stages.episodes import EpisodeJob, play

    config = bench.config
    jobs = [
        EpisodeJob(
            task=task,
            index=index,
            seed=derive_seed(config.run.seed, STAGE, step, task.task_id, index),
            skill=None,
            skill_id=None,
            episode_id=episode_id("r", step, task, index),
        )
        for task in tasks
        for index in range(config.rollout.group_size)
    ]
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
    turns = [row for record in records for row in record.turn_rows(step)]
    watch.add("sampled_tokens", sum(len(row["token_ids"]) for row in turns))
    return {"rollout_turns": turns, "rollouts": [record.episode_row(step, weights_sha256) for record in records]}


def episode_id(kind: str, step: int, task: Task, index: int) -> str:
    """An id unique in the run: kind (r rollout, p replay, e evaluation), step, task hash, index within the task."""
    return f"{kind}-{step:05d}-{task.sha256[:12]}-{index:02d}"


def summarise(run: RunDirectory, step: int) -> dict[str, Any]:
    """Figures of a complete rollout: episodes, success, mean turns, invalid share, environment errors, stop reasons."""
    columns = ["won", "turns", "invalid_turns", "stop_reason", "sampled_tokens"]
    return episode_figures(read_table(run, "rollouts", step, columns=columns))
