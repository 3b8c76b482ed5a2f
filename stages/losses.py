"""The terms of the training loss and the normalisers they share: method section 3.

Tensors in, small frozen dataclasses out: no files, no configuration object, no model. All token tensors are `(B, T)`:
B rows (turn rows, whole episodes, or written skills) padded to T places; `mask` is true on the tokens the policy sampled.
Places outside the mask may hold anything, infinities and NaN included: they are overwritten before any arithmetic, so their
gradient is exactly 0.

Every term is already divided by a GLOBAL denominator (`Denominators`, counted over all micro-batches and ranks of one
optimiser step), so that terms of micro-batches add up to the term of the whole batch. Whoever averages gradients over W
ranks afterwards has to multiply by W.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor

from schemas.errors import ConfigError, NumericsError

LOSS_AGGREGATIONS = ("token_mean", "sequence_mean")
MAXIMUM_SUFFIX = "_max"  # metrics whose name ends so are merged by maximum, all others by sum


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One term, or its share from one micro-batch: `loss` carries the gradient, `metrics` are sums, counts and maxima."""

    loss: Tensor  # scalar
    metrics: dict[str, Tensor] = field(default_factory=dict)  # scalars, float64, detached


@dataclass(frozen=True, slots=True)
class Denominators:
    """What the terms of one optimiser step are divided by, counted over all of its micro-batches and ranks."""

    tokens: float = 0.0  # sampled tokens of rollout rows
    rows: float = 0.0  # rollout rows with at least one such token
    skills: float = 0.0  # written skills with a reward and at least one token

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(self.tokens + other.tokens, self.rows + other.rows, self.skills + other.skills)

    def as_tuple(self) -> tuple[float, float, float]:
        """Plain numbers, for a sum over ranks; `Denominators(*numbers)` is the way back."""
        return astuple(self)  # type: ignore[return-value]


def count_denominators(rollout_mask: Tensor, skill_mask: Tensor | None = None) -> Denominators:
    """Denominators of one micro-batch from the masks `(B, T)` that its losses use; add them up over micro-batches.

    This is the only place where loss tokens are counted, so numerator and denominator cannot drift apart.

    >>> count_denominators(torch.tensor([[True, True, False], [False, False, False]])).as_tuple()
    (2.0, 1.0, 0.0)
    """
    skills = 0.0 if skill_mask is None else float(skill_mask.any(-1).sum())
    return Denominators(float(rollout_mask.sum()), float(rollout_mask.any(-1).sum()), skills)


def token_weights(mask: Tensor, loss_agg: str, tokens: float, rows: float) -> Tensor:
    """What each token's loss is multiplied by, `(B, T)` float64, 0 outside the mask; over the whole batch it sums to 1.

    `token_mean`: 1 / tokens. `sequence_mean`: 1 / (tokens of the row * rows). `tokens` and `rows` are global counts.

    >>> token_weights(torch.tensor([[True, True, False], [True, False, False]]), "sequence_mean", 3, 2).tolist()
    [[0.25, 0.25, 0.0], [0.5, 0.0, 0.0]]
    """
    if loss_agg not in LOSS_AGGREGATIONS:
        raise ConfigError("unknown loss aggregation", expected=" or ".join(LOSS_AGGREGATIONS), found=loss_agg)
    count = tokens if loss_agg == "token_mean" else rows
    if count <= 0:
        if bool(mask.any()):
            raise NumericsError("loss tokens without a denominator", expected="the count of all rows", found=count)
        return torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    if loss_agg == "token_mean":
        return mask.double() / tokens
    return mask.double() / (mask.sum(-1, keepdim=True).clamp(min=1).double() * rows)


def token_mean(values: Tensor, mask: Tensor, tokens: float) -> Tensor:
    """Sum of `values` over the mask / `tokens`, the global number of loss tokens; a scalar.

    >>> token_mean(torch.tensor([[1.0, 1.0, 50.0]]), torch.tensor([[True, True, False]]), tokens=2).item()
    1.0
    """
    return (values.masked_fill(~mask, 0.0) * token_weights(mask, "token_mean", tokens, 0.0).to(values.dtype)).sum()


def sequence_mean(values: Tensor, mask: Tensor, rows: float) -> Tensor:
    """Mean over the tokens of each row, then the sum over rows / `rows`, the global number of rows with tokens; a scalar.

    >>> sequence_mean(torch.tensor([[1.0, 3.0], [4.0, 9.0]]), torch.tensor([[True, True], [True, False]]), rows=2).item()
    3.0
    """
    return (values.masked_fill(~mask, 0.0) * token_weights(mask, "sequence_mean", 0.0, rows).to(values.dtype)).sum()


def _total(values: Tensor) -> Tensor:
    return values.detach().double().sum()


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    chosen = values.detach().double()[mask]
    return chosen.max() if chosen.numel() else torch.zeros((), dtype=torch.float64, device=values.device)


def _over_tokens(values: Tensor, like: Tensor) -> Tensor:
    """A row quantity `(B,)` or a token quantity `(B, T)` as `(B, T)`, without gradient."""
    expanded = values if values.dim() == like.dim() else values.unsqueeze(-1)
    return expanded.detach().to(like.device, like.dtype).expand_as(like)


def _clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Per token: the surrogate to maximise, the ratio, and whether the clip cut the gradient; all `(B, T)`."""
    current = logprobs.masked_fill(~mask, 0.0)
    behaviour = current.detach() if old_logprobs is None else old_logprobs.detach().masked_fill(~mask, 0.0)
    advantage = _over_tokens(advantages, current).masked_fill(~mask, 0.0)
    ratio = torch.exp(current - behaviour)
    plain, limited = ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage
    return torch.minimum(plain, limited), ratio, (limited < plain).detach() & mask


def policy_gradient_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    clip: float = 0.2,
) -> LossTerm:
    """Clipped surrogate, `- sum weight * min(ratio * A, clip(ratio, 1 +- clip) * A)` (method section 3, GRPO).

    `logprobs` `(B, T)` with gradient; `old_logprobs` `(B, T)`, or None for the first step of an iteration, where they equal
    the detached current ones (ratio exactly 1, gradient that of `-A * logprob`); `advantages` `(B,)` or `(B, T)`; `weights`
    from `token_weights`. Metrics: tokens, clipped_tokens, ratio (sum), ratio_max.

    >>> two = torch.log(torch.tensor([[0.5, 0.25]]))
    >>> ones = torch.ones(1, 2, dtype=torch.bool)
    >>> term = policy_gradient_loss(two, two - 1.0, torch.tensor([2.0]), ones, ones / 2)  # ratio e, cut at 1.2
    >>> round(term.loss.item(), 6), int(term.metrics["clipped_tokens"])
    (-2.4, 2)
    """
    surrogate, ratio, clipped = _clipped_surrogate(logprobs, old_logprobs, advantages, mask, clip)
    metrics = {
        "tokens": _total(mask),
        "clipped_tokens": _total(clipped),
        "ratio": _total(ratio.masked_fill(~mask, 0.0)),
        "ratio_max": _largest(ratio, mask),
    }
    return LossTerm(-(surrogate * weights.to(surrogate.dtype)).sum(), metrics)


def logprob_gap(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Delta = sg[l_T - l_S] `(B, T)`, and where it exists: in the mask, with a finite teacher log-probability."""
    scored = mask & torch.isfinite(teacher_logprobs)
    gap = teacher_logprobs.detach().masked_fill(~scored, 0.0) - logprobs.detach().masked_fill(~scored, 0.0)
    return gap, scored


def gate(gap: Tensor, slope: float = 5.0) -> Tensor:
    """sigmoid(beta_gate * Delta), `(B, T)`; slope 0 is the constant 0.5 to the last bit.

    >>> [round(value, 4) for value in gate(torch.tensor([-0.2, 0.0, 0.2])).tolist()]
    [0.2689, 0.5, 0.7311]
    """
    return torch.sigmoid(slope * gap.detach())


def opsd_loss(
    logprobs: Tensor, teacher_logprobs: Tensor, token_trust: Tensor, mask: Tensor, weights: Tensor
) -> LossTerm:
    """Distillation on the student's own tokens, `sum weight * trust * (sg[l_T] - l_S)` (method section 3, OPSD).

    `token_trust` `(B, T)` is omega_q * gate, never negative, without gradient. The gradient is that of a weighted negative
    log-likelihood of the student: it only ever raises sampled tokens, whatever the sign of the value. A token whose teacher
    log-probability is not finite (no skill, not scored) has no loss; it stays in the denominator, the count of all loss
    tokens. Metrics: tokens (scored), active_tokens (trust > 0), gap (sum of Delta), trust (sum).

    >>> student, teacher = torch.tensor([[-2.0, -1.0]]), torch.tensor([[-1.0, -3.0]])
    >>> ones = torch.ones(1, 2, dtype=torch.bool)
    >>> opsd_loss(student, teacher, torch.tensor([[1.5, 0.5]]), ones, ones / 2).loss.item()  # (1.5 * 1 + 0.5 * -2) / 2
    0.25
    """
    gap, scored = logprob_gap(logprobs, teacher_logprobs, mask)
    strength = token_trust.detach().masked_fill(~scored, 0.0)
    difference = teacher_logprobs.detach().masked_fill(~scored, 0.0) - logprobs.masked_fill(~scored, 0.0)
    metrics = {
        "tokens": _total(scored),
        "active_tokens": _total(strength > 0.0),
        "gap": _total(gap),
        "trust": _total(strength),
    }
    return LossTerm((strength * difference * weights.to(difference.dtype)).sum(), metrics)


def skill_loss(
    logprobs: Tensor, old_logprobs: Tensor | None, reward: Tensor, mask: Tensor, skills: float, clip: float = 0.2
) -> LossTerm:
    """`- mean_q [ mean_t min(ratio * r_q, clip(ratio) * r_q) ]` over written skills (method section 3, Skill).

    `reward` `(B,)` is r_q and must be finite where the row has tokens; `skills` is the global number of skills with tokens.
    Metrics: tokens, sequences, clipped_tokens, reward (sum over sequences), reward_absolute (sum).

    >>> ones = torch.ones(2, 1, dtype=torch.bool)
    >>> skill_loss(torch.zeros(2, 1), None, torch.tensor([1.0, -0.5]), ones, skills=2).loss.item()
    -0.25
    """
    written = mask.any(-1)
    reward = reward.masked_fill(~written, 0.0)
    surrogate, _, clipped = _clipped_surrogate(logprobs, old_logprobs, reward, mask, clip)
    metrics = {
        "tokens": _total(mask),
        "sequences": _total(written),
        "clipped_tokens": _total(clipped),
        "reward": _total(reward),
        "reward_absolute": _total(reward.abs()),
    }
    weights = token_weights(mask, "sequence_mean", 0.0, skills).to(surrogate.dtype)
    return LossTerm(-(surrogate * weights).sum(), metrics)


def k3_kl(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, weights: Tensor) -> LossTerm:
    """KL(policy || reference) by the k3 estimator, `sum weight * (exp(d) - 1 - d)`, d = sg[l_ref] - l (method section 3, KL).

    Never negative; the gradient with respect to `logprobs` is 1 - exp(d). Metrics: tokens, kl (sum), kl_max.

    >>> one = torch.ones(1, 1, dtype=torch.bool)
    >>> round(k3_kl(torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), one, one.float()).loss.item(), 6)  # 1/e
    0.367879
    """
    difference = reference_logprobs.detach().masked_fill(~mask, 0.0) - logprobs.masked_fill(~mask, 0.0)
    kl = torch.expm1(difference) - difference
    metrics = {"tokens": _total(mask), "kl": _total(kl), "kl_max": _largest(kl, mask)}
    return LossTerm((kl * weights.to(kl.dtype)).sum(), metrics)


@dataclass(frozen=True, slots=True)
class LogprobMismatch:
    """How far the trainer's log-probabilities are from those the rollout engine sampled with, as sums that add up."""

    tokens: float = 0.0  # compared tokens
    absolute: float = 0.0  # sum of |trainer - engine|
    k3: float = 0.0  # sum of the k3 estimates of KL(engine || trainer)
    largest: float = 0.0  # max of |trainer - engine|
    non_finite: float = 0.0  # sampled tokens left out because one side is not finite

    def __add__(self, other: LogprobMismatch) -> LogprobMismatch:
        return LogprobMismatch(
            self.tokens + other.tokens,
            self.absolute + other.absolute,
            self.k3 + other.k3,
            max(self.largest, other.largest),
            self.non_finite + other.non_finite,
        )

    @property
    def mean(self) -> float:
        """Mean of |trainer - engine|, 0 if nothing was compared."""
        return self.absolute / self.tokens if self.tokens else 0.0

    @property
    def k3_mean(self) -> float:
        """Mean k3 estimate of KL(engine || trainer) per token, 0 if nothing was compared."""
        return self.k3 / self.tokens if self.tokens else 0.0


def logprob_mismatch(engine_logprobs: Tensor, trainer_logprobs: Tensor, mask: Tensor) -> LogprobMismatch:
    """Mismatch over the masked tokens of `(B, T)` log-probabilities, in float64; shown before any clip.

    >>> ones = torch.ones(1, 2, dtype=torch.bool)
    >>> found = logprob_mismatch(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), ones)
    >>> found.mean, found.largest, round(found.k3, 6)  # exp(-0.5) - 1 + 0.5
    (0.25, 0.5, 0.106531)
    """
    finite = mask & torch.isfinite(engine_logprobs) & torch.isfinite(trainer_logprobs)
    difference = trainer_logprobs.detach()[finite].double() - engine_logprobs.detach()[finite].double()
    return LogprobMismatch(
        tokens=float(finite.sum()),
        absolute=float(difference.abs().sum()),
        k3=float((torch.expm1(difference) - difference).sum()),
        largest=float(difference.abs().max()) if difference.numel() else 0.0,
        non_finite=float((mask & ~finite).sum()),
    )


def merge_metrics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Metrics of micro-batches put together: names ending in `_max` by maximum, all others by sum."""
    merged: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            elif name.endswith(MAXIMUM_SUFFIX):
                merged[name] = torch.maximum(merged[name], value)
            else:
                merged[name] = merged[name] + value
    return merged
