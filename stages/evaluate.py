"""Stage `evaluate`: a checkpoint plays every task of the evaluation panel, no skill in context (method section 1, row 9).

Reads checkpoint N and the panel; writes `eval_turns` and `evals`, one row per episode. Seeds come from (evaluate.seed,
task, attempt) alone, so tokens and outcomes are a function of (weights, panel, seed): no batch size, no step and no earlier
evaluation can change them. Another panel, another model or other settings go to a run directory of their own (`apart`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from schemas.config import Config
from schemas.config_loading import code_version, config_part_sha256
from schemas.run_directory import RunDirectory
from schemas.table_io import read_table
from stages.panels import EVALUATE, panel_record
from stages.part_publishing import Rows, chunks, finish_parts, publish_parts
from stages.reports import EvaluationReport, evaluation_report
from stages.rollout import episode_id
from stages.seeds import derive_seed
from stages.stage import Reporter, SilentReporter, StageResult, Stopwatch, open_stage
from stages.workbench import Workbench, bench_of

STAGE = "evaluate"
TABLES = ("eval_turns", "evals")
REPORT_COLUMNS = ("task_id", "task_type", "won", "turns", "invalid_turns", "stop_reason", "error")

# Batch sizes are left out on purpose: they change no outcome.
DECIDING = (
    "env.name",
    "env.options",
    "env.max_turns",
    "prompt",
    "engine.name",
    "engine.options",
    "model.dtype",
    "evaluate.temperature",
    "evaluate.attempts",
    "evaluate.seed",
)

Weights = tuple[Path, str]  # model directory, weights hash


def stage_inputs(run: RunDirectory, step: int, bench: Workbench, weights_sha256: str | None = None) -> dict[str, str]:
    """Hashes of what the stage's output depends on; `weights_sha256` of a model that is no checkpoint of the run."""
    return {
        "weights": weights_sha256 or bench.weights_sha256(step),
        "panel": bench.panel_sha256(EVALUATE),
        "config": config_part_sha256(run.config, *DECIDING),
        "code": code_version(),
    }


def run(
    run: RunDirectory,
    step: int,
    *,
    force: bool = False,
    reporter: Reporter | None = None,
    bench: Workbench | None = None,
    weights: Weights | None = None,
) -> StageResult:
    """Evaluate checkpoint `step` of the run, or `weights` under that step's number, on the run's evaluation panel.

    Episodes with an environment error are rows like all others; the report counts them as not won and lists them.
    Raises ArtifactError for a missing checkpoint and for stale output without `force`.
    """
    reporter = reporter or SilentReporter()
    with run.lock(), bench_of(run, bench, reporter) as workbench:
        inputs = stage_inputs(run, step, workbench, weights and weights[1])
        if not open_stage(run, STAGE, step, TABLES, inputs, force):
            return StageResult(STAGE, step, "up_to_date", report(run, step).as_dict())
        model_dir = weights[0] if weights else workbench.model_dir(step)
        with Stopwatch(run, STAGE, step) as watch:
            config = run.config.evaluate
            panel = workbench.panel(EVALUATE)
            attempts = [(task, attempt) for task in panel for attempt in range(config.attempts)]
            reporter.stage(STAGE, len(attempts), "episodes")
            workbench.note_environment_change(EVALUATE, reporter)
            publish_parts(
                run,
                step,
                TABLES,
                inputs=inputs,
                parts=chunks(attempts, config.batch_episodes),
                play=lambda part: _play(workbench, step, part, (model_dir, inputs["weights"]), reporter, watch),
                units=len,
                reporter=reporter,
                shape=config.batch_episodes,
            )
            reporter.done()
        finish_parts(run, step, TABLES, kind=STAGE, inputs=inputs, extra=panel_record(run, EVALUATE))
        return StageResult(STAGE, step, "done", report(run, step).as_dict())


def _play(
    bench: Workbench, step: int, attempts: Sequence, weights: Weights, reporter: Reporter, watch: Stopwatch
) -> dict[str, Rows]:
    """The rows of one part."""
    from stages.episodes import EpisodeJob, play

    config = bench.config.evaluate
    model_dir, weights_sha256 = weights
    jobs = [
        EpisodeJob(
            task=task,
            index=attempt,
            seed=derive_seed(config.seed, STAGE, task.task_id, attempt),
            skill=None,
            skill_id=None,
            episode_id=episode_id("e", step, task, attempt),
        )
        for task, attempt in attempts
    ]
    records = play(
        bench.engine_of(model_dir, weights_sha256),
        bench.environment,
        bench.renderer_of(model_dir),
        jobs,
        limits=bench.limits,
        temperature=config.temperature,
        reporter=reporter,
        batch_episodes=config.batch_episodes,
    )
    panel = panel_record(bench.run, EVALUATE)
    facts = {"panel": panel["source"], "panel_sha256": panel["sha256"]}
    turns = [row for record in records for row in record.turn_rows(step)]
    watch.add("sampled_tokens", sum(len(row["token_ids"]) for row in turns))
    return {"eval_turns": turns, "evals": [record.episode_row(step, weights_sha256) | facts for record in records]}


def report(run: RunDirectory, step: int) -> EvaluationReport:
    """The report of a complete evaluation. Raises ArtifactError when there is none or it is damaged."""
    return evaluation_report(read_table(run, "evals", step, columns=REPORT_COLUMNS))


def apart(
    config: Config,
    out: Path,
    *,
    model: str | None = None,
    checkpoint: tuple[RunDirectory, int] | None = None,
    panel: str | None = None,
    attempts: int | None = None,
    reporter: Reporter | None = None,
    force: bool = False,
) -> StageResult:
    """Evaluate outside any training run: `out` becomes a run directory that holds nothing but this evaluation.

    Give either `model` (a directory, hub name or `bundled:NAME`; step 0 of `out`) or `checkpoint` (a run and its step, read
    in place). `panel` and `attempts` replace `tasks.evaluate` and `evaluate.attempts` of `config`. `out` may be used
    again for other steps of the same run with the same settings.
    """
    evaluate = config.evaluate if attempts is None else config.evaluate.model_copy(update={"attempts": attempts})
    tasks = config.tasks if panel is None else config.tasks.model_copy(update={"evaluate": panel})
    settings = config.model_copy(update={"evaluate": evaluate, "tasks": tasks})
    if checkpoint is None:
        if model is not None:
            settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": model})})
        return run(RunDirectory.create(out, settings), 0, force=force, reporter=reporter)
    source, step = checkpoint
    bench = Workbench(source)
    weights = (bench.model_dir(step), bench.weights_sha256(step))
    return run(RunDirectory.create(out, settings), step, force=force, reporter=reporter, weights=weights)
