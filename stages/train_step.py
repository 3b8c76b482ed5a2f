"""Stage `train-step`: ONE update of the policy on the rollouts and checked skills of a step (method section 1, row 8).

Reads checkpoint N - 1, `rollouts`, `rollout_turns` and, where the objective uses skills, `skills`, `replays` and `gains`
of step N; writes `train_rows`, `train_metrics` and checkpoint N. The tables' parts come first, then the checkpoint, and
the manifest of `train_metrics` last: it completes the step. Nothing is published unless the update was sound, and a batch
that could not be used is kept under `RUN/failed/`.

A loss that is enabled and reaches no token fails the step when the record holds rows for it. When the record itself says
why there are none (no skill was parsed or checked, every trust is 0), the step goes on with the other losses and the
metric `<loss>/unrealised` is 1; it fails only when no loss but the KL term is left.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from data.progress import Reporter, SilentReporter
from data.seeds import derive_seed
from schemas.artifacts import Manifest, publish_directory, read_manifest, sha256_json
from schemas.config_loading import code_version, config_part_sha256
from schemas.errors import ArtifactError, EngineError, NumericsError
from schemas.run_directory import RunDirectory, free_space_check
from schemas.table_io import clear_step, finish_step, read_table, rebuild_command, step_manifest, write_part
from stages.checkpoints import KIND, apply_retention, next_checkpoint_bytes
from stages.schedules import learning_rate
from stages.stage import StageResult, Stopwatch, open_stage
from stages.workbench import Workbench, bench_of

if TYPE_CHECKING:
    from stages.learner import TrainingBatch, UpdateResult
    from stages.objective import Objective
    from stages.training_rows import TrainingRows

STAGE = "train-step"
TABLES = ("train_rows", "train_metrics")
SKILL_TABLES = ("skills", "replays", "gains")

_CONFIG = (
    "env.name",
    "env.options",
    "engine.max_logprob_gap",
    "learner",
    "model.dtype",
    "objective",
    "optimizer",
    "prompt.enable_thinking",
    "prompt.history",
    "prompt.mode",
    "run.seed",
)


def stage_inputs(run: RunDirectory, step: int, bench: Workbench) -> dict[str, str]:
    """Hashes of what the stage's output depends on."""
    inputs = {
        "weights": bench.weights_sha256(step - 1),
        "checkpoint": _checkpoint_sha256(run, step - 1),
        "rollouts": step_manifest(run, "rollouts", step).sha256,
        # Under a schedule that falls, the rate of a step depends on how many steps there will be.
        "config": config_part_sha256(run.config, *_CONFIG, *(["run.steps"] if _falls(run) else [])),
        "code": code_version(),
    }
    if _uses_skills(run):
        for table in SKILL_TABLES[1:]:
            inputs[table] = step_manifest(run, table, step).sha256
    if run.config.objective.kl_coef:
        inputs["reference"] = bench.weights_sha256(0)
    return inputs


def _falls(run: RunDirectory) -> bool:
    return run.config.optimizer.schedule != "constant"


def _uses_skills(run: RunDirectory) -> bool:
    from stages.learner import objective_of

    objective = objective_of(run.config.objective)
    return objective.needs_teacher or objective.needs_skill_rows


def _checkpoint_sha256(run: RunDirectory, step: int) -> str:
    """Manifest hash of a checkpoint (weights and optimiser state); of one that retention removed, from the record."""
    if step == 0 or (run.checkpoint_dir(step) / "manifest.json").is_file():
        return read_manifest(run.checkpoint_dir(step), verify=False).sha256
    return str(step_manifest(run, TABLES[-1], step).extra["checkpoint_sha256"])


def run(
    run: RunDirectory,
    step: int,
    *,
    force: bool = False,
    reporter: Reporter | None = None,
    bench: Workbench | None = None,
) -> StageResult:
    """Update the policy of checkpoint `step - 1` and publish checkpoint `step`.

    A bench that is passed in keeps the learner for the next step. Raises ArtifactError for inputs that are missing, damaged
    or made with other weights and for stale output, NumericsError for a loss or gradient that is not finite or a loss that
    reaches no token, EngineError for log-probabilities that are too far from the engine's.
    """
    reporter = reporter or SilentReporter()
    with run.lock(), bench_of(run, bench, reporter) as workbench:
        inputs = stage_inputs(run, step, workbench)
        owed = open_stage(run, STAGE, step, TABLES, inputs, force, lambda: workbench.model_dir(step - 1))
        if not owed and _checkpoint_is_due(run, step, force, workbench):
            workbench.model_dir(step - 1)  # raises when it is gone, before the record of the step is removed
            clear_step(run, TABLES, step)
            owed = True
        if not owed:
            return StageResult(STAGE, step, "up_to_date", summarise(run, step))
        with Stopwatch(run, step, STAGE) as watch:
            reporter.stage(STAGE, None, "phases")
            _train(run, step, inputs, workbench, reporter, watch)
            reporter.done()
        return StageResult(STAGE, step, "done", summarise(run, step))


def _checkpoint_is_due(run: RunDirectory, step: int, force: bool, bench: Workbench) -> bool:
    """Whether a finished step has lost its checkpoint, or with `force` whether the one it has is damaged.

    Retention never removes the newest one.
    """
    present = run.finished_steps("checkpoints")
    if force and step in present:
        try:
            bench.verify(step)
        except ArtifactError:
            return True
    return max(present, default=0) < step


def _train(
    run: RunDirectory, step: int, inputs: dict[str, str], bench: Workbench, reporter: Reporter, watch: Stopwatch
) -> None:
    from stages.learner import TrainingBatch

    with watch.measure("rows_seconds"):
        made = read_training_rows(run, step, bench)
    reporter.advance(rows=len(made.rows), tokens=int(made.counts["tokens"]))
    watch.add("tokens", made.counts["tokens"])
    watch.add("padded_rows", len(made.rows))
    optimizer = run.config.optimizer
    batch = TrainingBatch(
        made.rows,
        lr=learning_rate(
            step,
            peak=optimizer.lr,
            schedule=optimizer.schedule,
            warmup_steps=optimizer.warmup_steps,
            total_steps=run.config.run.steps,
        ),
        seed=derive_seed(run.config.run.seed, STAGE, step),
    )
    free_space_check(run.root, next_checkpoint_bytes(bench.model_dir(step - 1), run.config.model.dtype))
    trainer = _Trainer(run, step, bench)
    try:
        with watch.measure("update_seconds"):
            result = trainer.update(batch)
        metrics = made.counts | result.metrics
        metrics |= check_targets(metrics, trainer.objective, _usable(made))
    except (NumericsError, EngineError) as error:
        trainer.drop()
        raise _kept(run, step, batch, error) from error
    except BaseException:
        trainer.drop()
        raise
    for name in sorted(metrics):
        if name.endswith("/unrealised") and metrics[name]:
            reporter.note(f"step {step}: the {name.partition('/')[0]} loss reached no token; see train_metrics")
    reporter.advance(loss=metrics["loss"], grad_norm=metrics["grad_norm"])
    with watch.measure("publish_seconds"):
        rows = {"train_rows": _row_rows(step, made, result), "train_metrics": _metric_rows(step, metrics)}
        write_part(run, step, 0, rows, sha256_json(inputs))
        checkpoint = trainer.publish(inputs)
        facts = {"weights_sha256": checkpoint.extra["weights_sha256"], "checkpoint_sha256": checkpoint.sha256}
        finish_step(run, TABLES, step, kind=STAGE, inputs=inputs, extra=facts)
        bench.verify(step)
        apply_retention(run, step)


def read_training_rows(run: RunDirectory, step: int, bench: Workbench) -> TrainingRows:
    """The rows of the step's update, from tables that were all made with the weights of checkpoint `step - 1`."""
    from stages.episodes import episodes_from_tables
    from stages.learner import objective_of
    from stages.training_rows import build_training_rows

    objective = objective_of(run.config.objective)
    rollouts = read_table(run, "rollouts", step)
    tables = {"rollouts": rollouts}
    skills: list[dict[str, Any]] = []
    gains: list[dict[str, Any]] = []
    if _uses_skills(run):
        tables["skills"] = read_table(run, "skills", step)
        tables["replays"] = read_table(run, "replays", step, columns=["weights_sha256"])
        skills = tables["skills"].to_pylist()
        gains = read_table(run, "gains", step).to_pylist()
    expected = bench.weights_sha256(step - 1)
    for name, table in tables.items():
        _check_weights(run, step, name, pc.unique(table["weights_sha256"]).to_pylist(), expected)
    records = episodes_from_tables(
        rollouts,
        read_table(run, "rollout_turns", step),
        {task.task_id: task for task in bench.tasks_of_step(step)},
    )
    return build_training_rows(
        records,
        skills,
        gains,
        bench.renderer(step - 1),
        run.config.objective,
        with_teacher=objective.needs_teacher,
        with_skills=objective.needs_skill_rows,
        distrusted_teach=objective.advantage_needs_teacher,
        context_tokens=bench.context_tokens(bench.model_dir(step - 1)),
    )


def _check_weights(run: RunDirectory, step: int, table: str, found: Iterable[str], expected: str) -> None:
    """On-policy means: sampled with the very weights that are updated. Resumed runs have trained on stale rollouts."""
    other = sorted(set(found) - {expected})
    if other:
        raise ArtifactError(
            "a table was made with other weights than those of the checkpoint to be trained",
            where=str(run.step_dir(table, step)),
            expected=f"weights {expected[:12]} of checkpoint {step - 1}",
            found=f"weights {other[0][:12]}",
            remedy=rebuild_command(run, table, step),
        )


def _usable(made: TrainingRows) -> dict[str, bool]:
    """Whether the record holds rows for the losses that need more than rollouts."""
    return {
        "opsd": any(row.teacher_token_ids is not None for row in made.rows),
        "skill": any(row.kind == "skill" for row in made.rows),
    }


def check_targets(metrics: Mapping[str, float], objective: Objective, usable: Mapping[str, bool]) -> dict[str, float]:
    """`<loss>/unrealised` (0 or 1) of every enabled loss.

    Raises NumericsError when a loss reached no token although the record holds rows for it (`usable`, True where it does
    not say), or when no loss that moves the policy is left.
    """
    reached = {name: metrics.get(f"{name}/tokens", 0.0) > 0 for name in objective.enabled}
    for name, was_reached in reached.items():
        if not was_reached and usable.get(name, True):
            raise NumericsError(
                f"the {name} loss is enabled and reaches no token",
                expected=">= 1 target token",
                found=f"0 of {int(metrics.get(f'{name}/candidate_tokens', 0.0))} candidate tokens",
                remedy="find out why its rows are not scored, or set its coefficient to 0",
            )
    moving: Collection[str] = [name for name in objective.enabled if name != "kl"]
    if not any(reached[name] for name in moving):
        raise NumericsError(
            "no enabled loss reaches a token",
            where=", ".join(moving) or "every coefficient but that of the KL term is 0",
            expected=">= 1 target token",
            found="no skill that was parsed and checked in this step",
            remedy="see the reasons in the tables skills and gains",
        )
    return {f"{name}/unrealised": float(not was_reached) for name, was_reached in reached.items()}


class _Trainer:
    """The update and its checkpoint, in this process (the learner stays on the bench) or in processes of its own."""

    def __init__(self, run: RunDirectory, step: int, bench: Workbench) -> None:
        from stages.learner import objective_of

        self._run, self._step, self._bench = run, step, bench
        self._processes = run.config.learner.processes
        self.objective = objective_of(run.config.objective)
        source = run.checkpoint_dir(step - 1)
        self._model_dir = bench.model_dir(step - 1)  # compared with its manifest, the optimiser's state included
        # Step 1 begins with a fresh optimiser, whatever checkpoint 0 came from.
        self._optimizer_dir = source / "optimizer" if step > 1 else None
        self._reference_dir = bench.model_dir(0) if self.objective.needs_reference else None
        self._job: Path | None = None

    def update(self, batch: TrainingBatch) -> UpdateResult:
        """Update the weights, in memory or in the job's directory."""
        if self._processes > 1:
            from stages.launch import train_in_processes

            self._job = self._run.root / f".tmp-training-{os.getpid()}"
            return train_in_processes(
                self._job,
                batch,
                self._run.config,
                model_dir=self._model_dir,
                optimizer_dir=self._optimizer_dir,
                reference_dir=self._reference_dir,
                log_path=self._run.log_path.parent / "training-processes.log",
            )
        return self._learner().update(batch)

    def _learner(self) -> Any:
        """The learner on the bench if it holds this very checkpoint, else a new one."""
        from stages.learner import Learner

        wanted = _checkpoint_sha256(self._run, self._step - 1)
        held = self._bench.learner
        if held is None or held.checkpoint_sha256 != wanted:
            self.drop()
            held = Learner(self._model_dir, self._optimizer_dir, self._run.config, self._reference_dir)
            self._bench.learner = held
        held.checkpoint_sha256 = None
        return held

    def publish(self, inputs: dict[str, str]) -> Manifest:
        """Checkpoint `step`, all or nothing; takes the place of one that an interrupted attempt left."""
        facts: dict[str, Any] = {"step": self._step}

        def write(directory: Path) -> None:
            if self._job is not None:
                (self._job / "model").rename(directory / "model")
                (self._job / "optimizer").rename(directory / "optimizer")
                facts["weights_sha256"] = json.loads((self._job / "result.json").read_text())["weights_sha256"]
            else:
                facts["weights_sha256"] = self._bench.learner.save(directory / "model", directory / "optimizer")

        target = self._run.checkpoint_dir(self._step)
        manifest = publish_directory(target, kind=KIND, inputs=inputs, write=write, extra=facts, replace=True)
        if self._job is not None:
            self._remove_job()
        else:
            self._bench.learner.checkpoint_sha256 = manifest.sha256
            self._bench.learner.model_dir = target / "model"
        return manifest

    def drop(self) -> None:
        """Let go of a learner or a job that must not be used again."""
        if self._bench.learner is not None:
            self._bench.learner.close()
            self._bench.learner = None
        self._remove_job()

    def _remove_job(self) -> None:
        if self._job is not None:
            shutil.rmtree(self._job, ignore_errors=True)
            self._job = None


def _kept(run: RunDirectory, step: int, batch: TrainingBatch, error: NumericsError | EngineError) -> Exception:
    """Keep the batch of a failed update, and name the file in the error."""
    from stages.batch_file import save_batch

    target = run.step_dir("failed", step)
    publish_directory(
        target,
        kind="failed-batch",
        inputs={},
        write=lambda directory: save_batch(directory / "batch.safetensors", batch, {"error": error.sentence()}),
        extra={"error": error.sentence()},
        replace=True,
    )
    kept = f"the batch is kept in {target}"
    return type(error)(
        error.what,
        where=error.where,
        expected=error.expected,
        found=error.found,
        remedy=f"{error.remedy}; {kept}" if error.remedy else kept,
    )


def _row_rows(step: int, made: TrainingRows, result: UpdateResult) -> list[dict[str, Any]]:
    rows = []
    for place, (row, facts) in enumerate(zip(made.rows, made.facts, strict=True)):
        teacher = result.teacher_logprobs[place]
        is_rollout = row.kind == "rollout"
        rows.append(
            {
                "step": step,
                **vars(facts),
                "loss_tokens": row.sampled_tokens,
                "advantage": row.advantage if is_rollout else None,
                "trust": row.trust if is_rollout else None,
                "skill_reward": row.skill_reward,
                "teacher_logprobs": None if teacher is None else teacher.tolist(),
                "trainer_logprobs": result.trainer_logprobs[place].tolist(),
            }
        )
    return rows


def _metric_rows(step: int, metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"step": step, "name": name, "value": metrics[name]} for name in sorted(metrics)]


def summarise(run: RunDirectory, step: int) -> dict[str, Any]:
    """The figures of a complete step that screens show; all of them are in `train_metrics`."""
    table = read_table(run, "train_metrics", step)
    metrics = dict(zip(table["name"].to_pylist(), table["value"].to_pylist(), strict=True))
    shown = {
        "loss": "loss",
        "grad_norm": "grad_norm",
        "lr": "lr",
        "tokens": "tokens",
        "rollout_rows": "rows/rollout",
        "skill_rows": "rows/skill",
        "zero_variance_share": "groups/zero_variance_share",
        "train_trust": "trust_mean",
        "opsd_active_share": "opsd/active_share",
        "policy_clipped_share": "policy/clipped_share",
        "mismatch_mean": "mismatch/mean",
        "mismatch_max": "mismatch/max",
    }
    figures = {name: metrics[source] for name, source in shown.items() if source in metrics}
    return figures | {"checkpoint": str(run.checkpoint_dir(step))}
