"""The training objective, a sum of parts: method section 3, row 8 of section 1.

An `Objective` holds loss parts and nothing else. A part with coefficient 0 is left out altogether; `needs_teacher`,
`needs_reference` and `needs_skill_rows` tell the caller which forward passes and rows it can save. Nothing here knows a
model, a file or a rank. Use: sum `LossInputs.denominators()` over all micro-batches and ranks, call `compute` and backward
for each micro-batch, `merge_metrics`, then `check_realised`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import stages.token_credit  # noqa: F401  registers the sibling methods' advantage parts
from schemas.errors import NumericsError
from stages.loss_parts import (
    ADVANTAGE_PARTS,
    DISTILLATION_WEIGHTS,
    LOSS_PARTS,
    DistillationPart,
    KLPart,
    LossInputs,
    LossPart,
    PolicyPart,
    SkillPart,
)
from stages.losses import Denominators, token_weights


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """`loss` is the scalar to call backward on; `metrics` holds sums, counts and maxima that merge over micro-batches."""

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Objective:
    """A sum of loss parts, each with a coefficient that is not 0."""

    parts: tuple[LossPart, ...]

    @classmethod
    def from_config(
        cls,
        *,
        grpo_coefficient: float = 1.0,
        opsd_coefficient: float = 0.01,
        skill_coefficient: float = 0.1,
        kl_coefficient: float = 0.01,
        clip: float = 0.2,
        loss_agg: str = "token_mean",
        advantage: str = "grpo",
        advantage_options: Mapping[str, Any] | None = None,
        distillation_weight: str = "gated",
        distillation_options: Mapping[str, Any] | None = None,
        extra_parts: Iterable[tuple[str, Mapping[str, Any]]] = (),
    ) -> Objective:
        """RSIPO by default; every other method of section 5 is a choice of these plain values.

        `advantage`, `distillation_weight` and the names in `extra_parts` are registered names or import strings; their
        options are the fields of the class. Raises ConfigError for an unknown name, option or aggregation.
        """
        token_weights(torch.zeros(0, 0, dtype=torch.bool), loss_agg, 0.0, 0.0)  # refuses an unknown name early
        credit = ADVANTAGE_PARTS.build(advantage, advantage_options or {})
        weight = DISTILLATION_WEIGHTS.build(distillation_weight, distillation_options or {})
        parts: list[LossPart] = [
            PolicyPart(coefficient=grpo_coefficient, advantage=credit, clip=clip, loss_agg=loss_agg),
            DistillationPart(coefficient=opsd_coefficient, weight=weight, loss_agg=loss_agg),
            SkillPart(coefficient=skill_coefficient, clip=clip),
            KLPart(coefficient=kl_coefficient, loss_agg=loss_agg),
        ]
        parts += [LOSS_PARTS.build(name, options) for name, options in extra_parts]
        return cls(tuple(part for part in parts if part.coefficient != 0.0))

    @property
    def needs_teacher(self) -> bool:
        """Whether teacher log-probabilities have to be computed."""
        return any(part.needs_teacher for part in self.parts)

    @property
    def advantage_needs_teacher(self) -> bool:
        """Whether the policy gradient itself reads teacher log-probabilities, whatever the trust."""
        return any(part.needs_teacher for part in self.parts if isinstance(part, PolicyPart))

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of the initial policy have to be computed."""
        return any(part.needs_reference for part in self.parts)

    @property
    def needs_skill_rows(self) -> bool:
        """Whether the batch has to contain the written skills."""
        return any(part.needs_skill_rows for part in self.parts)

    @property
    def enabled(self) -> tuple[str, ...]:
        """Names of the parts, for `check_realised`."""
        return tuple(part.name for part in self.parts)

    def compute(self, inputs: LossInputs, denominators: Denominators) -> LossOutputs:
        """This micro-batch's share of the loss; `denominators` count the whole optimiser step.

        Metrics: `<part>/loss` (before the coefficient), the part's own, and `loss`. Raises NumericsError if a part's inputs
        are missing.
        """
        loss = inputs.student_logprobs.masked_fill(~inputs.mask, 0.0).sum() * 0.0  # a graph even without any part
        metrics: dict[str, Tensor] = {}
        for part in self.parts:
            term = part.compute(inputs, denominators)
            loss = loss + part.coefficient * term.loss
            metrics[f"{part.name}/loss"] = term.loss.detach().double()
            metrics |= {f"{part.name}/{name}": value for name, value in term.metrics.items()}
        metrics["loss"] = loss.detach().double()
        return LossOutputs(loss, metrics)


def check_realised(metrics: Mapping[str, Tensor | float], enabled: Iterable[str]) -> None:
    """Raise NumericsError if an enabled loss reached no token in a whole optimiser step (`metrics` merged over it).

    A reached token may still have weight 0 (trust 0, a group without spread): that is a value, not a fault.
    """
    for name in enabled:
        reached = float(metrics.get(f"{name}/tokens", 0.0))
        if reached == 0.0:
            candidates = int(float(metrics.get(f"{name}/candidate_tokens", 0.0)))
            raise NumericsError(
                f"the {name} loss is enabled and reaches no token",
                expected=">= 1 target token",
                found=f"0 of {candidates} candidate tokens",
                remedy="set its coefficient to 0, or find out why its rows are missing or unscored",
            )


def summarise(metrics: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Merged metrics as plain numbers, with the shares and means that make sense per token; sums stay as they are.

    Adds `<part>/<x>_share` for every `<part>/<x>_tokens` (clipped, gated, active, of the tokens reached) and
    `<part>/<x>_mean` for the sums ratio, gap, trust, kl; for skills `reward_mean` per written skill.
    """
    numbers = {name: float(value) for name, value in metrics.items()}
    for name, value in list(numbers.items()):
        part, _, measure = name.rpartition("/")
        tokens = numbers.get(f"{part}/tokens", 0.0)
        if tokens and measure in ("clipped_tokens", "gated_tokens", "active_tokens"):
            numbers[f"{part}/{measure.removesuffix('_tokens')}_share"] = value / tokens
        elif tokens and measure in ("ratio", "gap", "trust", "kl"):
            numbers[f"{name}_mean"] = value / tokens
        elif numbers.get(f"{part}/sequences", 0.0) and measure in ("reward", "reward_absolute"):
            numbers[f"{name}_mean"] = value / numbers[f"{part}/sequences"]
    return numbers
