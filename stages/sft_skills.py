"""Stage `sft-skills`: teach the base model to write skills, from annotated trajectories (method section 1, before step 1).

Reads a file of annotations and `model.path`; writes `checkpoints/step=00000`. Only annotations whose answer parses as a
skill are used [S]. Held-out tasks are chosen by hash, never by position. Each epoch ends with an artefact `RUN/sft/`, so a
kill costs at most one epoch; it is removed when checkpoint 0 is published. The optimiser is not kept: step 1 of the
run begins with a fresh one. Training runs in the calling process, whatever `learner.processes` says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data.annotations import read_annotations
from data.model_files import resolve_model, weights_sha256
from data.progress import Reporter, SilentReporter
from data.seeds import derive_seed
from schemas.artifacts import publish_directory, read_manifest, sha256_file, sha256_json, status, write_file
from schemas.config_loading import code_version, config_part_sha256
from schemas.errors import ArtifactError
from schemas.run_directory import RunDirectory
from stages.checkpoints import KIND, SFT_WORK, import_model
from stages.schedules import learning_rate
from stages.skill_examples import (
    Example,
    audit_examples,
    check_audit,
    data_report,
    examples_of,
    split_examples,
    train_row,
)
from stages.stage import StageResult, Stopwatch
from stages.workbench import Workbench, bench_of

if TYPE_CHECKING:
    from stages.learner import Learner
    from stages.packing import TrainRow

STAGE = "sft-skills"


def run(
    run: RunDirectory,
    annotations: Path,
    *,
    force: bool = False,
    reporter: Reporter | None = None,
    bench: Workbench | None = None,
) -> StageResult:
    """Fine-tune `model.path` on the file `annotations` and publish checkpoint 0.

    Raises ArtifactError for an unreadable file, and where checkpoint 0 exists and was made from something else (unless
    `force`); ConfigError when too few examples are left or the data audit fails its thresholds.
    """
    reporter = reporter or SilentReporter()
    with run.lock(), bench_of(run, bench, reporter) as workbench:
        source = resolve_model(run.config.model.path, run.config.model.revision)
        inputs = _inputs(run, annotations, source)
        target = run.checkpoint_dir(0)
        if not _is_owed(target, inputs, force):
            return StageResult(STAGE, 0, "up_to_date", _summary(run, dict(read_manifest(target).extra)))
        with Stopwatch(run, 0, STAGE):
            training = _Training(run, workbench, reporter, source, sha256_json(inputs))
            training.prepare(annotations)
            report = training.train()
            final = training.model_dir
            extra = {"weights_sha256": weights_sha256(final), "sft": report}

            def write(directory: Path) -> None:
                shutil.copytree(final, directory / "model")

            publish_directory(target, kind=KIND, inputs=inputs, write=write, extra=extra, replace=True)
            shutil.rmtree(_work_directory(run), ignore_errors=True)
        return StageResult(STAGE, 0, "done", _summary(run, extra))


def _is_owed(checkpoint: Path, inputs: dict[str, str], force: bool) -> bool:
    """Whether checkpoint 0 is to be made; with `force` one that is damaged or was made from something else is owed too."""
    try:
        found = status(checkpoint, inputs)
        if found.state == "complete":
            read_manifest(checkpoint)
    except ArtifactError:
        if not force:
            raise
        return True
    if found.state == "stale" and not force:
        raise ArtifactError(
            "checkpoint 0 was made from something else",
            where=str(checkpoint),
            found=f"changed inputs: {'; '.join(found.changed)}",
            remedy="make it anew with --force (every later step is stale then), or start another run",
        )
    return found.state != "complete"


def _inputs(run: RunDirectory, annotations: Path, source: Path) -> dict[str, str]:
    if not annotations.is_file():
        raise ArtifactError(
            "there is no such file of annotations", where=str(annotations), remedy="check --annotations"
        )
    fields = ("run.seed", "model.dtype", "env.name", "env.options", "prompt", "optimizer", "sft", "learner")
    return {
        "annotations": sha256_file(annotations),
        "source_weights": weights_sha256(source),
        "config": config_part_sha256(run.config, *fields, "replay"),
        "code": code_version(),
    }


def _work_directory(run: RunDirectory) -> Path:
    return run.root / SFT_WORK


def _summary(run: RunDirectory, extra: dict[str, Any]) -> dict[str, Any]:
    return {**extra["sft"], "weights": extra["weights_sha256"][:12], "next_command": f"rsipo loop --run {run.root}"}


class _Training:
    """One run of the stage: data, model and where it has got to."""

    def __init__(
        self, run: RunDirectory, bench: Workbench, reporter: Reporter, source: Path, inputs_sha256: str
    ) -> None:
        self.run, self.bench, self.reporter, self.source = run, bench, reporter, source
        self.settings = run.config.sft
        self.inputs_sha256 = inputs_sha256
        self.work = _work_directory(run)
        self.model_dir = self.work / "base" / "model"
        self.report: dict[str, Any] = {}
        self.train_rows: list[TrainRow] = []
        self.held_out: list[Example] = []

    def prepare(self, annotations: Path) -> None:
        """Import the model, read and audit the annotations, split them."""
        self._import_base()
        renderer = self.bench.renderer_of(self.model_dir)
        found, refused = read_annotations(annotations, self._action)
        longest = min(self.settings.max_length, self.bench.context_tokens(self.model_dir))
        min_words = self.run.config.replay.min_skill_words
        examples, unusable = examples_of(found, renderer, min_words=min_words, max_length=longest)
        rejected = sorted([*refused, *unusable], key=lambda rejection: rejection.line)
        lines = [json.dumps(asdict(rejection), ensure_ascii=False) + "\n" for rejection in rejected]
        write_file(self.run.root / "logs" / "sft-rejected.jsonl", "".join(lines).encode())
        self.reporter.note(f"{len(examples)} annotations accepted, {len(rejected)} rejected")
        audit = audit_examples(examples)
        self.report = data_report(examples, rejected, audit)
        check_audit(audit, self.settings)
        train, self.held_out = split_examples(examples, self.settings.held_out, self.run.config.run.seed)
        self.report |= {"training_examples": len(train), "held_out_examples": len(self.held_out)}
        self.train_rows = [train_row(example) for example in train]

    def _action(self, reply: str) -> str | None:
        return self.bench.environment.parse_reply(reply, cut=False).action

    def _import_base(self) -> None:
        def write(directory: Path) -> None:
            import_model(self.source, directory / "model", self.run.config.model.dtype)

        self._artefact("base", write)

    def _artefact(self, name: str, write: Any) -> Path:
        """A piece of work in progress: made unless it is there, undamaged and made from the same inputs."""
        target = self.work / name
        if not self._is_usable(target):
            inputs = {"inputs": self.inputs_sha256}
            publish_directory(target, kind=STAGE, inputs=inputs, write=write, replace=True)
        return target

    def _is_usable(self, target: Path) -> bool:
        """Work in progress is compared byte by byte: training goes on from it. What is damaged is owed again."""
        try:
            if status(target, {"inputs": self.inputs_sha256}).state != "complete":
                return False
            read_manifest(target)
        except ArtifactError:
            return False
        return True

    def train(self) -> dict[str, Any]:
        """All epochs that are owed, then the report: held-out loss and share that parses, before and after."""
        first = self._measured("before", self.model_dir)
        epochs, per_epoch = self.settings.epochs, -(-len(self.train_rows) // self.settings.batch_rows)
        done = self._finished_epochs()
        if done:
            self.reporter.note(f"resumed after epoch {done} of {epochs}")
        optimizer_dir = None
        if done:
            self.model_dir = self._epoch_directory(done) / "model"
            optimizer_dir = self._epoch_directory(done) / "optimizer"
        learner = self._learner(self.model_dir, optimizer_dir)
        try:
            self.reporter.stage(STAGE, epochs * per_epoch, "updates")
            self.reporter.advance(done * per_epoch)
            for epoch in range(done + 1, epochs + 1):
                self._epoch(learner, epoch, per_epoch)
            self.reporter.done()
        finally:
            learner.close()
        last = self._measured("after", self.model_dir)
        figures = {f"{name}_before": value for name, value in first.items()}
        figures |= {f"{name}_after": value for name, value in last.items()}
        return {**self.report, "updates": epochs * per_epoch, **dict(sorted(figures.items()))}

    def _epoch_directory(self, epoch: int) -> Path:
        return self.work / f"epoch={epoch:03d}"

    def _finished_epochs(self) -> int:
        """The last epoch that was saved for these inputs; earlier ones have been removed."""
        epochs = range(1, self.settings.epochs + 1)
        return max((n for n in epochs if self._is_usable(self._epoch_directory(n))), default=0)

    def _epoch(self, learner: Learner, epoch: int, per_epoch: int) -> None:
        """One pass over the training rows in an order of its own, saved at its end."""
        settings = self.settings
        generator = np.random.Generator(np.random.PCG64(derive_seed(self.run.config.run.seed, STAGE, epoch)))
        order = [int(index) for index in generator.permutation(len(self.train_rows))]
        total = settings.epochs * per_epoch
        for number in range(per_epoch):
            step = (epoch - 1) * per_epoch + number + 1
            chosen = order[number * settings.batch_rows : (number + 1) * settings.batch_rows]
            lr = learning_rate(
                step,
                peak=settings.lr,
                schedule="cosine",
                warmup_steps=round(settings.warmup_share * total),
                total_steps=total,
            )
            metrics = learner.supervised_update([self.train_rows[index] for index in chosen], lr)
            self.reporter.advance(1, loss=round(metrics["loss"], 4))

        def write(directory: Path) -> None:
            learner.save(directory / "model", directory / "optimizer")

        self.model_dir = self._artefact(f"epoch={epoch:03d}", write) / "model"
        shutil.rmtree(self._epoch_directory(epoch - 1), ignore_errors=True)

    def _learner(self, model_dir: Path, optimizer_dir: Path | None) -> Learner:
        from stages.learner import Learner

        return Learner(model_dir, optimizer_dir, self.run.config)

    def _measured(self, name: str, model_dir: Path) -> dict[str, float]:
        """Held-out loss and the share of held-out prompts answered with a usable skill; kept for a resumed start."""

        def write(directory: Path) -> None:
            scorer = self._learner(model_dir, None)
            try:
                rows = [train_row(example) for example in self.held_out]
                figures = {"held_out_loss": held_out_loss(scorer, rows)}
            finally:
                scorer.close()
            figures["parse_share"] = self._parse_share(model_dir)
            (directory / "figures.json").write_text(json.dumps(figures))

        return dict(json.loads((self._artefact(name, write) / "figures.json").read_text()))

    def _parse_share(self, model_dir: Path) -> float:
        from stages.engines import GenerationRequest
        from stages.skill_writing import parse_skill

        config = self.run.config.replay
        renderer = self.bench.renderer_of(model_dir)
        requests = [
            GenerationRequest(
                prompt_ids=list(example.prompt_ids),
                max_new_tokens=config.max_skill_tokens,
                seed=derive_seed(self.run.config.run.seed, STAGE, "held-out", example.line),
                temperature=config.skill_temperature,
            )
            for example in self.held_out
        ]
        results = self.bench.engine_of(model_dir, weights_sha256(model_dir)).generate(requests)
        parsed = [
            parse_skill(
                renderer.decode(result.token_ids), cut=result.stop_reason == "length", min_words=config.min_skill_words
            )
            for result in results
        ]
        return sum(skill.skill is not None for skill in parsed) / len(parsed)


def held_out_loss(learner: Learner, rows: Sequence[TrainRow]) -> float:
    """Mean negative log-likelihood of the answers' tokens, at temperature 1."""
    logprobs = learner.logprobs(rows)
    return -float(sum(values.astype(np.float64).sum() for values in logprobs)) / sum(row.sampled_tokens for row in rows)
