"""Token credit of the sibling methods: RLSD, OPID and AgentOPSD (method section 5).

RLSD and OPID look at single tokens and are advantage parts of the objective. AgentOPSD looks at whole episodes: its numpy
function is called once a step, before micro-batches are formed, and its result goes into `LossInputs.advantages`.
The status of every constant is that of the method page; a decaying mix is the caller's schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from schemas.errors import ConfigError, NumericsError
from stages.estimators import FloatArray, IntArray, grouped_sums
from stages.loss_parts import ADVANTAGE_PARTS, LossInputs
from stages.losses import logprob_gap


def _gap_and_advantage(inputs: LossInputs, method: str) -> tuple[Tensor, Tensor]:
    if inputs.teacher_logprobs is None:
        raise NumericsError(f"{method} credit needs teacher log-probabilities", expected="a tensor", found="none")
    gap, _ = logprob_gap(inputs.student_logprobs, inputs.teacher_logprobs, inputs.rollout_mask)
    advantage = inputs.advantages if inputs.advantages.dim() == gap.dim() else inputs.advantages.unsqueeze(-1)
    return gap, advantage.detach().to(gap.dtype).expand_as(gap)


@ADVANTAGE_PARTS.register("rlsd")
@dataclass(frozen=True, slots=True)
class RLSDAdvantage:
    """A_t = A * ((1 - mix) + mix * clip(exp(sign(A) * Delta_t), 1 - clip, 1 + clip)); without a teacher A_t = A."""

    mix: float = 0.5
    clip: float = 0.2
    needs_teacher: ClassVar[bool] = True

    def token_advantages(self, inputs: LossInputs) -> Tensor:
        gap, advantage = _gap_and_advantage(inputs, "RLSD")
        credit = torch.exp(torch.sign(advantage) * gap).clamp(1.0 - self.clip, 1.0 + self.clip)
        return advantage * ((1.0 - self.mix) + self.mix * credit)


@ADVANTAGE_PARTS.register("opid")
@dataclass(frozen=True, slots=True)
class OPIDAdvantage:
    """A_t = A + scale * Delta_t; without a teacher A_t = A."""

    scale: float = 0.001
    needs_teacher: ClassVar[bool] = True

    def token_advantages(self, inputs: LossInputs) -> Tensor:
        gap, advantage = _gap_and_advantage(inputs, "OPID")
        return advantage + self.scale * gap


@dataclass(frozen=True, slots=True)
class TurnCredit:
    """AgentOPSD's credit of each turn, all `(N,)`, turns ordered as given."""

    advantage_N: FloatArray  # A_k
    belief_before_N: FloatArray  # B_{k-1}
    belief_N: FloatArray  # B_k
    weight_N: FloatArray  # w_k, 1 where an episode has no spread


def agent_opsd_credit(
    turn_gap: ArrayLike,
    episode: ArrayLike,
    advantage: ArrayLike,
    success_rate: ArrayLike,
    *,
    mix: float = 0.5,
    memory: float = 1.0,
    bound: float = 0.2,
    prior_floor: float = 0.05,
    eps: float = 1e-6,
) -> TurnCredit:
    """Advantage of every turn from the beliefs its evidence moves (method section 5, AgentOPSD).

    `turn_gap` `(N,)` is e_k, the sum of Delta over the turn's tokens; `episode` `(N,)` holds indices 0..R - 1, turns of an
    episode in order of play and next to each other; `advantage` and `success_rate` `(R,)` belong to episodes. `memory` is
    gamma, `bound` is b in (0, 1), `mix` is lambda. Ours [O]: the success rate is clipped to `prior_floor` from 0 and 1, the
    bound is 0.2, the standard deviation has ddof = 0, and an episode whose turns do not differ keeps its advantage.
    |A_k - A| <= mix * bound * |A|; A_k has the sign of A.

    >>> credit = agent_opsd_credit([0.0, 2.0], [0, 0], [1.0], [0.5], eps=0.0)  # z = -1, 1
    >>> [round(value, 6) for value in credit.advantage_N.tolist()]
    [0.9, 1.1]
    """
    if not 0.0 < bound < 1.0 or not 0.0 <= mix <= 1.0:
        raise ConfigError(
            "AgentOPSD's bound or mix out of range", expected="0 < b < 1, 0 <= mix <= 1", found=(bound, mix)
        )
    gap_N, episode_N = np.asarray(turn_gap, np.float64), np.asarray(episode, np.int64)
    if np.any(np.diff(episode_N) < 0):
        raise NumericsError("turns are not grouped by episode", expected="episode indices that never fall")
    advantage_N = np.asarray(advantage, np.float64)[episode_N]
    prior_N = np.clip(np.asarray(success_rate, np.float64), prior_floor, 1.0 - prior_floor)[episode_N]
    first_N = np.concatenate([[True], np.diff(episode_N) > 0])[: len(episode_N)]
    evidence_N = _running_evidence(gap_N, first_N, memory)
    logit_N = np.log(prior_N) - np.log1p(-prior_N)
    belief_N = _sigmoid(logit_N + evidence_N)
    before_N = np.where(first_N, prior_N, np.concatenate([[0.0], belief_N])[: len(belief_N)])
    weight_N = _bounded_weights(np.sign(advantage_N) * (belief_N - before_N), episode_N, bound, eps)
    return TurnCredit(advantage_N * ((1.0 - mix) + mix * weight_N), before_N, belief_N, weight_N)


def _running_evidence(gap_N: FloatArray, first_N: np.ndarray, memory: float) -> FloatArray:
    """c_k = memory * c_{k-1} + e_k, starting anew at each first turn."""
    evidence = np.empty_like(gap_N)
    carried = 0.0
    for index, gap in enumerate(gap_N):
        carried = gap if first_N[index] else memory * carried + gap
        evidence[index] = carried
    return evidence


def _sigmoid(values: FloatArray) -> FloatArray:
    small = np.exp(-np.abs(values))  # never overflows
    return np.where(values >= 0.0, 1.0, small) / (1.0 + small)


def _bounded_weights(shift_N: FloatArray, episode_N: IntArray, bound: float, eps: float) -> FloatArray:
    """w = clip(1 + b z, 1 - b, 1 + b), z the standardised shift within an episode."""
    episodes = int(episode_N[-1]) + 1 if len(episode_N) else 0
    turns = np.maximum(np.bincount(episode_N, minlength=episodes), 1)
    centred_N = shift_N - (grouped_sums(shift_N, episode_N, episodes) / turns)[episode_N]
    std_N = np.sqrt(grouped_sums(centred_N**2, episode_N, episodes) / turns)[episode_N]
    flat_N = std_N <= 1e-12
    z_N = np.where(flat_N, 0.0, centred_N / np.where(flat_N, 1.0, std_N + eps))
    return np.clip(1.0 + bound * z_N, 1.0 - bound, 1.0 + bound)
