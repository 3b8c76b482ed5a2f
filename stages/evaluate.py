"""Stage `evaluate`: a checkpoint plays every task of the evaluation panel, no skill in context (method section 1, row 9).

Reads checkpoint N and the panel; writes `eval_turns` and `evals`, one row per episode. Seeds come from (evaluate.seed,
task, attempt) alone, so tokens and outcomes are a function of (weights, panel, seed): no batch size, no step and no earlier
evaluation can change them. Another panel, another model or other settings go to a run directory of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.progress import Reporter, SilentReporter
from data.seeds import derive_seed
from schemas.config import Config
from schemas.config_loading import code_version, config_part_sha256
from schemas.errors import ArtifactError, ConfigError, EnvironmentFault
from schemas.run_directory import RunDirectory
from schemas.table_io import clear_step, read_table, stage_status
from stages.episode_progress import EpisodeProgress
from stages.evaluation_settings import EvaluationOptions
from stages.panels import EVALUATE, panel_record
from stages.part_publishing import Rows, chunks, finish_parts, publish_parts
from stages.reports import EvaluationReport, evaluation_report
from stages.rollout import episode_id
from stages.stage import StageResult, Stopwatch, open_stage
from stages.workbench import ENVIRONMENT, Workbench, bench_of

STAGE = "evaluate"
TABLES = ("eval_turns", "evals")
REPORT_COLUMNS = ("task_id", "task_type", "won", "turns", "invalid_turns", "stop_reason", "error", "metrics", "labels")

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
    # The environment first, the weights last: what is configured wrongly is found before checkpoint 0 is made.
    return {
        ENVIRONMENT: bench.environment_version,
        "panel": bench.panel_sha256(EVALUATE),
        "weights": weights_sha256 or bench.weights_sha256(step),
        "config": config_part_sha256(run.config, *DECIDING),
        "code": code_version(),
    }


def run(
    run: RunDirectory | None,
    step: int | None = None,
    *,
    force: bool = False,
    reporter: Reporter | None = None,
    bench: Workbench | None = None,
    out: Path | None = None,
    config: Config | None = None,
    model: str | None = None,
    panel: str | None = None,
    attempts: int | None = None,
    seed: int | None = None,
    temperature: float | None = None,
    batch: int | None = None,
) -> StageResult:
    """Evaluate checkpoint `step` of `run` (default: the latest) or `model`.

    Without `out` the result belongs to the run, and panel and settings must be the run's. With `out` any `panel` and
    settings are fine: `out` becomes a run directory that holds nothing but evaluations, with `config` (default: the run's)
    and the options given; the checkpoint is read in place. `batch` changes no result. Episodes with an environment error
    are rows like all others; the report counts them as not won and lists them. More of them than `env.max_error_share` fail
    nothing here (see `check_errors`), but with `force` such an evaluation is made again. Raises ConfigError for options that need
    `out`, ArtifactError for a missing checkpoint and for stale output without `force`.
    """
    if run is not None and model is None and step is None:
        step = max(run.finished_steps("checkpoints"), default=0)
    chosen = EvaluationOptions(model, panel, attempts, seed, temperature, batch)
    if out is None:
        if run is None:
            raise ConfigError("nowhere to write", where="--out", expected="a directory", remedy="add --out DIR")
        batch_episodes = chosen.batch_of(chosen.of_the_run(run.config))
        return _evaluate(run, step or 0, force, reporter, bench, batch_episodes, None)
    base = config or (run.config if run is not None else Config())
    target = RunDirectory.create(out, chosen.applied(base))
    batch_episodes = chosen.batch_of(base)
    if model is not None or run is None:
        return _evaluate(target, 0, force, reporter, None, batch_episodes, None)
    source = Workbench(run)
    weights = (source.model_dir(step or 0), source.weights_sha256(step or 0))
    return _evaluate(target, step or 0, force, reporter, None, batch_episodes, weights)


def _evaluate(
    run: RunDirectory,
    step: int,
    force: bool,
    reporter: Reporter | None,
    bench: Workbench | None,
    batch_episodes: int,
    weights: Weights | None,
) -> StageResult:
    """Evaluate a checkpoint of `run`, or `weights` under the number of that step."""
    reporter = EpisodeProgress(reporter or SilentReporter())
    with run.lock(), bench_of(run, bench, reporter) as workbench:
        inputs = stage_inputs(run, step, workbench, weights and weights[1])

        def weights_dir() -> Path:
            return weights[0] if weights else workbench.model_dir(step)

        if force and _is_broken(run, step, inputs):
            weights_dir()  # raises when they are gone, before the result is removed
            clear_step(run, TABLES, step)
        if not open_stage(run, STAGE, step, TABLES, inputs, force, weights_dir):
            return StageResult(STAGE, step, "up_to_date", summarise(run, step))
        model_dir = weights_dir()
        with Stopwatch(run, step, STAGE) as watch:
            panel = workbench.panel(EVALUATE)
            episodes = [(task, attempt) for task in panel for attempt in range(run.config.evaluate.attempts)]
            reporter.stage(STAGE, len(episodes), "episodes")
            workbench.note_environment_change(EVALUATE, reporter)
            publish_parts(
                run,
                step,
                TABLES,
                inputs=inputs,
                parts=chunks(episodes, batch_episodes),
                play=lambda part: _play(workbench, step, part, (model_dir, inputs["weights"]), reporter, watch),
                units=len,
                reporter=reporter,
                shape=batch_episodes,
            )
            reporter.done()
            workbench.note_environment_work(watch, reporter)
        finish_parts(run, step, TABLES, kind=STAGE, inputs=inputs, extra=panel_record(run, EVALUATE))
        return StageResult(STAGE, step, "done", summarise(run, step))


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
        batch_episodes=None,
    )
    panel = panel_record(bench.run, EVALUATE)
    facts = {"panel": panel["source"], "panel_sha256": panel["sha256"]}
    turns = [row for record in records for row in record.turn_rows(step)]
    watch.add("sampled_tokens", sum(len(row["token_ids"]) for row in turns))
    return {"eval_turns": turns, "evals": [record.episode_row(step, weights_sha256) | facts for record in records]}


def check_errors(result: StageResult, config: Config) -> None:
    """Raise EnvironmentFault when more than `env.max_error_share` of an evaluation's episodes ended in an error.

    The result stays: it is reported first, whatever it says.
    """
    errors, episodes = result.summary["env_errors"], result.summary["episodes"]
    if errors > config.env.max_error_share * episodes:
        first = str(result.summary["failed"][0]["error"])
        raise EnvironmentFault(
            "too many episodes of evaluate ended in an environment error, its figures mean little",
            where="env.max_error_share",
            expected=f"at most {config.env.max_error_share:.0%}",
            found=f"{errors} of {episodes}, the first: {first[:600]!r}",
            remedy="repair the environment and run the same command with --force",
        )


def _is_broken(run: RunDirectory, step: int, inputs: dict[str, str]) -> bool:
    """Whether a complete evaluation has more environment errors than are allowed; a damaged one is another matter."""
    try:
        if stage_status(run, TABLES, step, inputs).state != "complete":
            return False
        check_errors(StageResult(STAGE, step, "done", summarise(run, step)), run.config)
    except EnvironmentFault:
        return True
    except ArtifactError:
        return False
    return False


def report(run: RunDirectory, step: int) -> EvaluationReport:
    """The report of a complete evaluation. Raises ArtifactError when there is none or it is damaged."""
    return evaluation_report(read_table(run, "evals", step, columns=REPORT_COLUMNS))


def summarise(run: RunDirectory, step: int) -> dict[str, Any]:
    """The report as plain figures, with the panel they belong to."""
    record = panel_record(run, EVALUATE)
    return report(run, step).as_summary() | {"panel": record["source"], "panel_sha256": record["sha256"][:12]}
