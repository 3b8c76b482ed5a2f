"""The learner: one RSIPO update of a policy under DeepSpeed ZeRO-3, on one process or many.

A `Learner` holds the policy, its AdamW state and, where the objective asks for it, the frozen reference. It takes rows
of tokens, never tables, and writes plain directories, never checkpoints. Every number it computes is divided by
denominators counted over the whole optimiser step, so losses and gradients depend neither on how rows are packed nor on
how many processes share them. It draws nothing at random: dropout is off, and mini-batches come from a seed in the batch.

Every method is collective: with several processes all of them call it with the same arguments.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.model_files import WeightsHash, tensor_entries, weights_sha256
from schemas.config import Config, ObjectiveSection
from schemas.errors import ArtifactError, EngineError, LearnerError, NumericsError
from stages.checkpoints import load_model, write_weights
from stages.loss_parts import ROLLOUT_ROW, SKILL_ROW, LossInputs
from stages.losses import Denominators, LogprobMismatch, logprob_mismatch, merge_metrics
from stages.objective import LossOutputs, Objective, summarise
from stages.packing import MicroBatch, TrainRow, mini_batches, plan
from stages.policy_forward import PREFIX, PolicyForward, prepare_policy
from stages.threads import set_threads
from stages.zero3 import MOMENTS, Zero3Engine

STATE_VERSION = 1
MASTER = "master"
Logprobs = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """Everything of one iteration's update: the rows, the learning rate, the seed of the mini-batches."""

    rows: Sequence[TrainRow]
    lr: float
    seed: int


@dataclass(frozen=True, eq=False)
class UpdateResult:
    """What an update measured.

    `trainer_logprobs` per row, of the weights before the update; `teacher_logprobs` per row, None where there was no
    teacher; `metrics` are plain numbers by name.
    """

    metrics: dict[str, float]
    trainer_logprobs: list[Logprobs]
    teacher_logprobs: list[Logprobs | None]


@dataclass(eq=False)
class _Scores:
    """Log-probabilities per row that an update needs besides the student's own."""

    teacher: list[Logprobs | None]
    reference: list[Logprobs] | None = None
    old: list[Logprobs] | None = None


@dataclass(eq=False)
class _Accumulated:
    """What one optimiser step's passes left behind, on every rank: merged metrics and the rows' log-probabilities."""

    metrics: dict[str, Tensor]
    logprobs: dict[int, Logprobs]
    faulty: list[str] = field(default_factory=list)


def objective_of(section: ObjectiveSection) -> Objective:
    """The objective that a configuration describes; ConfigError for a class that cannot be imported or used."""
    trusted = section.opsd_weight == "trust"
    weight: str
    options: dict[str, Any]
    if section.opsd_gate == "constant":
        weight, options = "constant", {"trusted": trusted}
    elif section.opsd_gate == "sigmoid":
        weight, options = "gated", {"slope": section.beta_gate, "trusted": trusted}
    elif trusted:
        weight, options = "trusted", {"gate": section.opsd_gate}
    else:
        weight, options = section.opsd_gate, {}
    return Objective.from_config(
        grpo_coefficient=section.grpo_coef,
        opsd_coefficient=section.opsd_coef,
        skill_coefficient=section.skill_coef,
        kl_coefficient=section.kl_coef,
        clip=section.eps_clip,
        loss_agg=section.loss_agg,
        advantage=section.advantage,
        advantage_options=section.advantage_options,
        distillation_weight=weight,
        distillation_options=options,
    )


class Learner:
    """A policy in training. `weights_sha256` names the weights it holds, as their checkpoint does."""

    def __init__(
        self,
        model_dir: Path,
        optimizer_dir: Path | None,
        config: Config,
        kl_reference_dir: Path | None = None,
    ) -> None:
        """Load weights, and the optimiser's state where there is one (`optimizer_dir` None: a fresh optimiser).

        `kl_reference_dir` is the initial policy; it is read only when the objective has a KL term. Raises ArtifactError
        when what was loaded is not what the files hold.
        """
        set_threads(config.run.threads)  # of this process: `stages.launch` has divided them among several
        self.config = config
        self.objective = objective_of(config.objective)
        self.model_dir = model_dir
        self._reference_dir = kl_reference_dir
        self._reference: PolicyForward | None = None
        policy = prepare_policy(
            load_model(model_dir, config.model.dtype), gradient_checkpointing=config.learner.gradient_checkpointing
        )
        self._dtype = getattr(torch, config.model.dtype)
        self.checkpoint_sha256: str | None = None  # of the checkpoint it holds; whoever publishes one keeps this true
        self._engine = Zero3Engine(policy, config.optimizer, config.model.dtype)
        self._weights_sha256: str | None = weights_sha256(model_dir)
        self._check_loaded()
        if optimizer_dir is not None:
            self._restore(optimizer_dir)

    # -- what it holds -------------------------------------------------------------------------------------------------

    @property
    def weights_sha256(self) -> str:
        """Hash of the current weights. LearnerError between an update and `save`, when they have no name yet."""
        if self._weights_sha256 is None:
            raise LearnerError("the updated weights have not been saved yet")
        return self._weights_sha256

    @property
    def updates(self) -> int:
        """Optimiser steps made in the whole training."""
        return self._engine.updates

    @property
    def rank(self) -> int:
        """This process among the training processes."""
        return self._engine.rank

    def state_dict(self) -> dict[str, Tensor]:
        """The weights by name, on CPU, in the model's type, as `save` writes them (rank 0; empty elsewhere)."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._engine.full_parameters():
            if self.rank == 0:
                tensors[name.removeprefix(PREFIX)] = tensor.to(self._dtype)
        return tensors

    # -- log-probabilities ---------------------------------------------------------------------------------------------

    def logprobs(self, rows: Sequence[TrainRow]) -> list[Logprobs]:
        """log pi(token | tokens before) of each row's sampled tokens, `(n,)` float32, at the row's temperature."""
        return self._score(rows, self._engine.forward)

    def _reference_logprobs(self, rows: Sequence[TrainRow]) -> list[Logprobs]:
        if self._reference is None:
            if self._reference_dir is None:
                raise LearnerError("a KL term without a reference policy", remedy="set objective.kl_coef=0")
            # Whole on every process: it only runs forward, and needs neither gradient nor optimiser state.
            model = load_model(self._reference_dir, self.config.model.dtype)
            self._reference = prepare_policy(model, gradient_checkpointing=False).to(self._engine.device).eval()
        return self._score(rows, self._reference)

    def _score(self, rows: Sequence[TrainRow], forward: Callable[..., Tensor]) -> list[Logprobs]:
        if not rows:
            return []
        found: dict[int, Logprobs] = {}
        with torch.no_grad():
            for batch in self._plan(rows):
                found |= _by_row(batch, self._forward(batch, forward))
        return [row for _, row in sorted(self._merge_rows(found).items())]

    def _plan(self, rows: Sequence[TrainRow]) -> list[MicroBatch]:
        settings = self.config.learner
        return plan(
            rows,
            micro_batch_tokens=settings.micro_batch_tokens,
            ranks=self._engine.ranks,
            rank=self._engine.rank,
            logits_chunk=settings.logits_chunk,
        )

    def _forward(self, batch: MicroBatch, forward: Callable[..., Tensor]) -> Tensor:
        """Log-probabilities in the compact layout `(B, S)` float32, 0 outside the mask."""
        device = self._engine.device
        token_ids, batch_index, position, slot, targets = (
            torch.from_numpy(array).to(device)
            for array in (batch.token_ids, batch.batch_index, batch.position, batch.slot, batch.targets)
        )
        flat = forward(token_ids, batch_index, position, targets, batch.temperature, batch.chunks)
        compact = torch.zeros(batch.mask.shape, dtype=flat.dtype, device=device)
        return compact.index_put((batch_index, slot), flat)

    def _merge_rows(self, found: dict[int, Logprobs]) -> dict[int, Logprobs]:
        merged: dict[int, Logprobs] = {}
        for part in self._engine.gather_objects(found):
            merged |= part
        return merged

    # -- updates -------------------------------------------------------------------------------------------------------

    def update(self, batch: TrainingBatch) -> UpdateResult:
        """One iteration's update: teacher and reference scores with the weights before it, then the AdamW steps.

        Raises NumericsError for a loss or gradient that is not finite and EngineError when the engine's
        log-probabilities are further from the trainer's than `engine.max_logprob_gap`; the step concerned has then
        changed nothing.
        """
        rows = list(batch.rows)
        if not any(row.sampled_tokens for row in rows):
            raise NumericsError(
                "there is no token to train on", expected=">= 1 sampled token", found=f"{len(rows)} rows"
            )
        scores = self._scores(rows)
        steps = mini_batches(rows, self.config.learner.minibatch_rows, batch.seed)
        trainer: dict[int, Logprobs] = {}
        if len(steps) > 1:
            scores.old = self.logprobs(rows)
            trainer = dict(enumerate(scores.old))
            self._check_mismatch(rows, trainer)
        parts: list[dict[str, Tensor]] = []
        norms: list[float] = []
        clipped = 0
        for indices in steps:
            accumulated = self._accumulate_objective(rows, indices, scores)
            if scores.old is None:
                trainer = accumulated.logprobs
                self._check_mismatch(rows, trainer)
            outcome = self._engine.step(batch.lr)
            self._weights_sha256 = None
            parts.append(accumulated.metrics)
            norms.append(outcome.grad_norm)
            clipped += outcome.clipped
        mismatch = _mismatch(rows, trainer)
        return UpdateResult(
            _update_metrics(parts, norms, clipped, mismatch, batch, self.updates),
            [trainer[index] for index in range(len(rows))],
            scores.teacher,
        )

    def supervised_update(self, rows: Sequence[TrainRow], lr: float) -> dict[str, float]:
        """One AdamW step on the mean negative log-likelihood of the sampled tokens."""
        tokens = float(sum(row.sampled_tokens for row in rows))
        if not tokens:
            raise NumericsError(
                "there is no token to train on", expected=">= 1 sampled token", found=f"{len(rows)} rows"
            )

        def loss_of(batch: MicroBatch, logprobs: Tensor) -> LossOutputs:
            mask = torch.from_numpy(batch.mask).to(logprobs.device)
            loss = -logprobs.masked_fill(~mask, 0.0).sum() / tokens
            return LossOutputs(loss, {"loss": loss.detach().double(), "tokens": mask.sum().double()})

        accumulated = self._accumulate(rows, loss_of)
        self._check_finite(accumulated)
        outcome = self._engine.step(lr)
        self._weights_sha256 = None
        numbers = {name: float(value) for name, value in accumulated.metrics.items()}
        return {**numbers, "grad_norm": outcome.grad_norm, "lr": lr}

    def _scores(self, rows: list[TrainRow]) -> _Scores:
        scores = _Scores(teacher=[None] * len(rows))
        if self.objective.needs_teacher:
            taught = [index for index, row in enumerate(rows) if row.teacher_token_ids is not None]
            found = self.logprobs([rows[index].teacher() for index in taught])
            for index, values in zip(taught, found, strict=True):
                scores.teacher[index] = values
        if self.objective.needs_reference:
            scores.reference = self._reference_logprobs(rows)
        return scores

    def _accumulate_objective(self, rows: list[TrainRow], indices: list[int], scores: _Scores) -> _Accumulated:
        chosen = [rows[index] for index in indices]
        denominators = _denominators(chosen)

        def loss_of(batch: MicroBatch, logprobs: Tensor) -> LossOutputs:
            inputs = _loss_inputs(batch, chosen, [indices[row] for row in batch.rows], scores, logprobs)
            return self.objective.compute(inputs, denominators)

        accumulated = self._accumulate(chosen, loss_of)
        self._check_finite(accumulated)
        accumulated.logprobs = {indices[row]: values for row, values in accumulated.logprobs.items()}
        return accumulated

    def _accumulate(
        self, rows: Sequence[TrainRow], loss_of: Callable[[MicroBatch, Tensor], LossOutputs]
    ) -> _Accumulated:
        """Forward and backward over this rank's micro-batches; no rank leaves the loop early, whatever it finds."""
        self._engine.discard_gradients()
        parts: list[dict[str, Tensor]] = []
        found: dict[int, Logprobs] = {}
        faulty: list[str] = []
        for batch in self._plan(rows):
            logprobs = self._forward(batch, self._engine.forward)
            outputs = loss_of(batch, logprobs)
            # Adding 0 * logprobs keeps the graph, and with it the collective backward pass, where nothing has a loss.
            self._engine.backward(outputs.loss + 0.0 * logprobs.sum() if not batch.rows else outputs.loss)
            if not math.isfinite(float(outputs.loss.detach())):
                faulty += [rows[row].row_id for row in batch.rows]
            found |= _by_row(batch, logprobs.detach())
            parts.append(outputs.metrics)
        metrics = self._merge_metrics(merge_metrics(parts))
        return _Accumulated(
            metrics, self._merge_rows(found), [row for part in self._engine.gather_objects(faulty) for row in part]
        )

    def _merge_metrics(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        names = sorted(local)
        stacked = torch.stack([local[name].detach().double().cpu() for name in names])
        total = self._engine.sum_over_ranks(stacked).cpu()
        largest = self._engine.sum_over_ranks(stacked, maximum=True).cpu()
        return {name: largest[place] if name.endswith("_max") else total[place] for place, name in enumerate(names)}

    def _check_finite(self, accumulated: _Accumulated) -> None:
        if accumulated.faulty:
            self._engine.discard_gradients()
            raise NumericsError(
                "the loss is not finite; the weights were not changed",
                where=f"micro-batches with the rows {', '.join(accumulated.faulty[:8])}",
                expected="a finite loss",
                found=float(accumulated.metrics["loss"]),
            )

    def _check_mismatch(self, rows: list[TrainRow], trainer: dict[int, Logprobs]) -> None:
        limit = self.config.engine.max_logprob_gap
        found = _mismatch(rows, trainer).mean
        if found > limit:
            self._engine.discard_gradients()
            raise EngineError(
                "the engine's log-probabilities are not the trainer's; the weights were not changed",
                where="engine.max_logprob_gap",
                expected=f"mean |difference| <= {limit:g} per token",
                found=f"{found:.4g}",
                remedy="check that engine and trainer use the same weights, type and temperature",
            )

    # -- on disk -------------------------------------------------------------------------------------------------------

    def save(self, model_dir: Path, optimizer_dir: Path) -> str:
        """Write `model_dir` (HF layout) and `optimizer_dir` (safetensors, state.json); the new weights hash.

        Nothing in them depends on the number of processes. Rank 0 writes, all take part.
        """
        tensors = self.state_dict()
        if self.rank == 0:
            for name in sorted(set(tensor_entries(self.model_dir)) - set(tensors)):
                tensors[name] = _read_tensor(self.model_dir, name)  # buffers, which training does not change
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
                raise NumericsError("a weight is not finite after the update", where=str(model_dir))
            write_weights(self.model_dir, model_dir, tensors)
        self._save_optimizer(optimizer_dir)
        self._weights_sha256 = self._engine.gather_objects(weights_sha256(model_dir) if self.rank == 0 else None)[0]
        return self.weights_sha256

    def _save_optimizer(self, optimizer_dir: Path) -> None:
        from safetensors.torch import save_file

        optimizer_dir.mkdir(parents=True, exist_ok=True)
        groups: dict[str, Any] = {moment: self._engine.full_moments(moment) for moment in MOMENTS}
        if self._dtype != torch.float32:
            groups[MASTER] = self._engine.full_parameters()
        for group, found in groups.items():
            tensors = {name.removeprefix(PREFIX): tensor for name, tensor in found if self.rank == 0}
            if tensors:
                save_file(tensors, optimizer_dir / f"{group}.safetensors")
        if self.rank == 0:
            state = {"version": STATE_VERSION, "optimizer": "AdamW", "updates": self.updates}
            (optimizer_dir / "state.json").write_text(json.dumps(state, indent=1) + "\n")

    def _restore(self, optimizer_dir: Path) -> None:
        from safetensors.torch import load_file

        path = optimizer_dir / "state.json"
        try:
            state = json.loads(path.read_text())
            if state["version"] != STATE_VERSION or state["optimizer"] != "AdamW":
                raise ValueError(f"version {state['version']} of {state['optimizer']}")
            updates = int(state["updates"])
            groups = {
                name: {PREFIX + key: value for key, value in load_file(optimizer_dir / f"{name}.safetensors").items()}
                for name in (*MOMENTS, MASTER)
                if (optimizer_dir / f"{name}.safetensors").is_file()
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError("cannot read the optimiser's state", where=str(path), found=str(error)) from error
        masters = groups.pop(MASTER, None)
        expected = set(self._engine.names)
        for name, tensors in {**groups, **({MASTER: masters} if masters else {})}.items():
            if set(tensors) != expected:
                raise ArtifactError("the optimiser's state does not fit the model", where=f"{optimizer_dir}/{name}")
        if updates and set(groups) != set(MOMENTS):
            raise ArtifactError("the optimiser's state is incomplete", where=str(optimizer_dir), expected=MOMENTS)
        self._engine.restore(updates, masters, groups)

    def _check_loaded(self) -> None:
        """Sharded loading has returned other weights without a word: hash what the engine really holds."""
        digest, buffers = WeightsHash(), set(tensor_entries(self.model_dir))
        for name, tensor in self._engine.full_parameters():
            plain = name.removeprefix(PREFIX)
            buffers.discard(plain)
            digest.add_tensor(plain, tensor.to(self._dtype))
        for name in buffers:
            digest.add_tensor(name, _read_tensor(self.model_dir, name))
        if digest.hexdigest() != self.weights_sha256:
            raise ArtifactError(
                "the learner holds other weights than the checkpoint",
                where=str(self.model_dir),
                expected=self.weights_sha256[:12],
                found=digest.hexdigest()[:12],
                remedy="check that model.dtype is the type of the checkpoint",
            )

    def close(self) -> None:
        """Release the engine; the object cannot be used afterwards."""
        self._engine.close()
        self._reference = None


def _read_tensor(model_dir: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(tensor_entries(model_dir)[name].file, framework="pt") as file:
        return file.get_tensor(name)


def _by_row(batch: MicroBatch, compact: Tensor) -> dict[int, Logprobs]:
    values = compact.detach().float().cpu().numpy()
    return {row: values[place, batch.mask[place]].copy() for place, row in enumerate(batch.rows)}


def _denominators(rows: Sequence[TrainRow]) -> Denominators:
    """Counts of one optimiser step. The masks of its micro-batches add up to exactly these rows."""
    rollouts = [row.sampled_tokens for row in rows if row.kind == "rollout"]
    skills = [row for row in rows if row.kind == "skill" and row.skill_reward is not None and row.sampled_tokens]
    return Denominators(float(sum(rollouts)), float(sum(count > 0 for count in rollouts)), float(len(skills)))


def _loss_inputs(
    batch: MicroBatch, rows: Sequence[TrainRow], origin: Sequence[int], scores: _Scores, logprobs: Tensor
) -> LossInputs:
    """`batch.rows` are positions in `rows`; `origin` are those rows' positions in the whole update, as in `scores`."""
    device = logprobs.device
    chosen = [rows[row] for row in batch.rows]

    def per_row(values: list[float]) -> Tensor:
        return torch.tensor(values or [0.0], dtype=torch.float32, device=device)

    def compact(source: Sequence[Logprobs | None] | None) -> Tensor | None:
        if source is None:
            return None
        out = np.full(batch.mask.shape, np.nan, np.float32)
        for place, index in enumerate(origin):
            values = source[index]
            if values is not None:
                out[place, : len(values)] = values
        return torch.from_numpy(out).to(device)

    return LossInputs(
        student_logprobs=logprobs,
        mask=torch.from_numpy(batch.mask).to(device),
        kind=torch.tensor([SKILL_ROW if row.kind == "skill" else ROLLOUT_ROW for row in chosen] or [0], device=device),
        advantages=per_row([row.advantage for row in chosen]),
        old_logprobs=compact(scores.old),
        teacher_logprobs=compact(scores.teacher),
        reference_logprobs=compact(scores.reference),
        trust=per_row([row.trust for row in chosen]),
        skill_reward=per_row([math.nan if row.skill_reward is None else row.skill_reward for row in chosen]),
    )


def _mismatch(rows: Sequence[TrainRow], trainer: dict[int, Logprobs]) -> LogprobMismatch:
    total = LogprobMismatch()
    for index, row in enumerate(rows):
        values = torch.from_numpy(trainer[index])
        total += logprob_mismatch(torch.from_numpy(row.behaviour_logprobs), values, torch.ones_like(values).bool())
    return total


def _update_metrics(
    parts: list[dict[str, Tensor]],
    norms: list[float],
    clipped: int,
    mismatch: LogprobMismatch,
    batch: TrainingBatch,
    updates: int,
) -> dict[str, float]:
    """Plain numbers: sums over the optimiser steps, except losses, which are means over them."""
    merged = {name: float(value) for name, value in merge_metrics(parts).items()}
    for name in merged:
        if name == "loss" or name.endswith("/loss"):
            merged[name] /= len(parts)
    return {
        **summarise(merged),
        "grad_norm": sum(norms) / len(norms),
        "grad_norm_max": max(norms),
        "grad_clipped_steps": float(clipped),
        "optimizer_steps": float(len(parts)),
        "updates": float(updates),
        "lr": batch.lr,
        "mismatch/tokens": mismatch.tokens,
        "mismatch/mean": mismatch.mean,
        "mismatch/max": mismatch.largest,
        "mismatch/k3": mismatch.k3_mean,
        "mismatch/non_finite": mismatch.non_finite,
    }
