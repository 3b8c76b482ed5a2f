"""The parts a training objective is composed of: method section 3, with room for every row of section 5.

Three kinds, each chosen by a registered name or by an import string `package.module:Class`:

- an `AdvantagePart` turns the advantages of rollouts into token advantages (plain GRPO here; token credit elsewhere);
- a `DistillationWeight` says how strongly each token is pulled to the teacher (gate times trust, constant, a selection);
- a `LossPart` is one term of the sum: policy gradient, distillation, skill, KL, or one of a user's own.

Policy gradient, distillation and KL act on rollout rows, the skill term on skill rows. Credit that looks at whole episodes
belongs before the split into micro-batches: it arrives here as `LossInputs.advantages`, one value a row or a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from schemas.errors import NumericsError
from stages.losses import (
    Denominators,
    LossTerm,
    count_denominators,
    gate,
    k3_kl,
    logprob_gap,
    opsd_loss,
    policy_gradient_loss,
    skill_loss,
    token_weights,
)
from stages.parts import Registry

ROLLOUT_ROW = 0
SKILL_ROW = 1


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One micro-batch. N rows of T places; all but `student_logprobs` are taken without gradient.

    Log-probabilities are those of the sampled tokens at the sampling temperature; places outside `mask` may hold anything.
    """

    student_logprobs: Tensor  # (N, T) with gradient
    mask: Tensor  # (N, T) bool, the sampled tokens
    kind: Tensor  # (N,) ROLLOUT_ROW or SKILL_ROW
    advantages: Tensor  # (N,) or (N, T); ignored on skill rows
    old_logprobs: Tensor | None = None  # (N, T); None: equal to the detached student's
    teacher_logprobs: Tensor | None = None  # (N, T), NaN where there is no teacher (no skill)
    reference_logprobs: Tensor | None = None  # (N, T)
    trust: Tensor | None = None  # (N,) omega; None: 1
    skill_reward: Tensor | None = None  # (N,) r_q, NaN where there is none; used on skill rows
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # what a user's own part needs, by name

    @property
    def rollout_mask(self) -> Tensor:
        """`(N, T)`: sampled tokens of rollout rows."""
        return self.mask & (self.kind == ROLLOUT_ROW).unsqueeze(-1)

    @property
    def skill_mask(self) -> Tensor:
        """`(N, T)`: sampled tokens of skill rows that have a finite reward."""
        rewarded = self.kind == SKILL_ROW
        rewarded = rewarded & torch.isfinite(self.skill_reward) if self.skill_reward is not None else rewarded & False
        return self.mask & rewarded.unsqueeze(-1)

    def denominators(self) -> Denominators:
        """This micro-batch's share of the denominators; the sum over all of them is what `Objective.compute` wants."""
        return count_denominators(self.rollout_mask, self.skill_mask)


class AdvantagePart(Protocol):
    """Token credit: what the policy gradient multiplies each sampled token with."""

    needs_teacher: bool

    def token_advantages(self, inputs: LossInputs) -> Tensor:
        """Advantages `(N,)` or `(N, T)`, without gradient."""
        ...


class DistillationWeight(Protocol):
    """How strongly each token is pulled to the teacher."""

    def strength(self, inputs: LossInputs, gap: Tensor) -> Tensor:
        """Weights `(N, T)`, not negative, without gradient; `gap` `(N, T)` is Delta, 0 where not scored."""
        ...


class LossPart(Protocol):
    """One term of the objective; `name` is the prefix of its metrics."""

    name: str
    coefficient: float
    needs_teacher: bool
    needs_reference: bool
    needs_skill_rows: bool

    def compute(self, inputs: LossInputs, denominators: Denominators) -> LossTerm:
        """The term before its coefficient. Metrics must hold `candidate_tokens` and `tokens` (those it reached)."""
        ...


ADVANTAGE_PARTS: Registry[AdvantagePart] = Registry("advantage", ("needs_teacher", "token_advantages"))
DISTILLATION_WEIGHTS: Registry[DistillationWeight] = Registry("distillation weight", ("strength",))
LOSS_PARTS: Registry[LossPart] = Registry("loss part", ("name", "coefficient", "compute"))


@ADVANTAGE_PARTS.register("grpo")
@dataclass(frozen=True, slots=True)
class GroupAdvantage:
    """The rollout's group advantage on each of its tokens, unchanged."""

    needs_teacher: ClassVar[bool] = False

    def token_advantages(self, inputs: LossInputs) -> Tensor:
        return inputs.advantages


@DISTILLATION_WEIGHTS.register("gated")
@dataclass(frozen=True, slots=True)
class GatedWeight:
    """omega_q * sigmoid(slope * Delta): RSIPO; with `trusted=False` (omega = 1) SDAR and SEED."""

    slope: float = 5.0
    trusted: bool = True

    def strength(self, inputs: LossInputs, gap: Tensor) -> Tensor:
        weight = gate(gap, self.slope)
        return weight * _row_trust(inputs, weight) if self.trusted else weight


@DISTILLATION_WEIGHTS.register("constant")
@dataclass(frozen=True, slots=True)
class ConstantWeight:
    """A constant, by default 0.5: OPSD and GRPO+OPSD; with `trusted=True` times omega_q."""

    value: float = 0.5
    trusted: bool = False

    def strength(self, inputs: LossInputs, gap: Tensor) -> Tensor:
        weight = torch.full_like(gap, self.value)
        return weight * _row_trust(inputs, weight) if self.trusted else weight


@DISTILLATION_WEIGHTS.register("trusted")
@dataclass(frozen=True, slots=True)
class TrustedWeight:
    """omega_q times the weight named `gate`, which so needs to know nothing of trust."""

    gate: str
    inner: DistillationWeight = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", DISTILLATION_WEIGHTS.build(self.gate, {}))

    def strength(self, inputs: LossInputs, gap: Tensor) -> Tensor:
        weight = self.inner.strength(inputs, gap)
        return weight * _row_trust(inputs, weight)


def _row_trust(inputs: LossInputs, like: Tensor) -> Tensor:
    if inputs.trust is None:
        return torch.ones_like(like)
    return inputs.trust.detach().to(like.device, like.dtype).unsqueeze(-1).expand_as(like)


@LOSS_PARTS.register("policy")
@dataclass(frozen=True, slots=True)
class PolicyPart:
    """The clipped surrogate on rollout rows with the advantages of an `AdvantagePart`."""

    coefficient: float = 1.0
    advantage: AdvantagePart = field(default_factory=GroupAdvantage)
    clip: float = 0.2
    loss_agg: str = "token_mean"
    name: ClassVar[str] = "policy"
    needs_reference: ClassVar[bool] = False
    needs_skill_rows: ClassVar[bool] = False

    @property
    def needs_teacher(self) -> bool:
        """Whether the advantage part reads teacher log-probabilities."""
        return self.advantage.needs_teacher

    def compute(self, inputs: LossInputs, denominators: Denominators) -> LossTerm:
        mask = inputs.rollout_mask
        advantages = self.advantage.token_advantages(inputs)
        weights = token_weights(mask, self.loss_agg, denominators.tokens, denominators.rows)
        term = policy_gradient_loss(inputs.student_logprobs, inputs.old_logprobs, advantages, mask, weights, self.clip)
        spread = advantages if advantages.dim() == mask.dim() else advantages.unsqueeze(-1)
        active = (mask & (spread.to(mask.device) != 0.0)).double().sum()
        return LossTerm(term.loss, term.metrics | {"candidate_tokens": _count(mask), "active_tokens": active})


@LOSS_PARTS.register("opsd")
@dataclass(frozen=True, slots=True)
class DistillationPart:
    """The gated log-probability gap on rollout rows, weighted by a `DistillationWeight`."""

    coefficient: float = 0.01
    weight: DistillationWeight = field(default_factory=GatedWeight)
    loss_agg: str = "token_mean"
    name: ClassVar[str] = "opsd"
    needs_teacher: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = False
    needs_skill_rows: ClassVar[bool] = False

    def compute(self, inputs: LossInputs, denominators: Denominators) -> LossTerm:
        teacher = _present(inputs.teacher_logprobs, "teacher log-probabilities", self.name)
        mask = inputs.rollout_mask
        gap, scored = logprob_gap(inputs.student_logprobs, teacher, mask)
        strength = self.weight.strength(inputs, gap)
        weights = token_weights(mask, self.loss_agg, denominators.tokens, denominators.rows)
        term = opsd_loss(inputs.student_logprobs, teacher, strength, mask, weights)
        gated = {"gated_tokens": _count(scored & (gap > 0.0))}  # gate above 0.5 for every positive slope
        return LossTerm(term.loss, term.metrics | gated | {"candidate_tokens": _count(mask)})


@LOSS_PARTS.register("skill")
@dataclass(frozen=True, slots=True)
class SkillPart:
    """The policy gradient of written skills with their sequence advantage r_q, on skill rows."""

    coefficient: float = 0.1
    clip: float = 0.2
    name: ClassVar[str] = "skill"
    needs_teacher: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    needs_skill_rows: ClassVar[bool] = True

    def compute(self, inputs: LossInputs, denominators: Denominators) -> LossTerm:
        mask = inputs.skill_mask
        reward = inputs.skill_reward if inputs.skill_reward is not None else torch.zeros_like(mask[:, 0]).float()
        term = skill_loss(inputs.student_logprobs, inputs.old_logprobs, reward, mask, denominators.skills, self.clip)
        candidates = inputs.mask & (inputs.kind == SKILL_ROW).unsqueeze(-1)
        return LossTerm(term.loss, term.metrics | {"candidate_tokens": _count(candidates)})


@LOSS_PARTS.register("kl")
@dataclass(frozen=True, slots=True)
class KLPart:
    """The k3 estimate of the KL to the initial policy on rollout rows."""

    coefficient: float = 0.01
    loss_agg: str = "token_mean"
    name: ClassVar[str] = "kl"
    needs_teacher: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = True
    needs_skill_rows: ClassVar[bool] = False

    def compute(self, inputs: LossInputs, denominators: Denominators) -> LossTerm:
        reference = _present(inputs.reference_logprobs, "reference log-probabilities", self.name)
        mask = inputs.rollout_mask
        weights = token_weights(mask, self.loss_agg, denominators.tokens, denominators.rows)
        term = k3_kl(inputs.student_logprobs, reference, mask, weights)
        return LossTerm(term.loss, term.metrics | {"candidate_tokens": _count(mask)})


def _count(mask: Tensor) -> Tensor:
    return mask.double().sum()


def _present(values: Tensor | None, what: str, part: str) -> Tensor:
    if values is None:
        raise NumericsError(f"the {part} loss needs {what}", expected="a tensor (rows, tokens)", found="none")
    return values
