"""From logits and one uniform number to one token: inverse CDF in token-id order, or argmax at temperature 0.

The uniforms of a reply come from its request's seed alone, so a draw never depends on the batch around it. The logits do,
in their last bits: `Choice.near_tie` marks every decision those bits could turn over, and the engine takes it again from
logits of a shape that does not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

GREEDY_MARGIN_FACTOR = 10.0  # a logit gap of 1e-3 and a CDF gap of 1e-4 are equally safe against noise in fp32 logits


def reply_uniforms(seed: int, count: int) -> np.ndarray:
    """`count` uniforms in [0, 1), float64; the t-th depends on (seed, t) only, not on `count`.

    >>> bool((reply_uniforms(3, 2) == reply_uniforms(3, 5)[:2]).all())
    True
    """
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


@dataclass(frozen=True)
class Choice:
    """One decision per row: token ids (n,), log-probabilities (n,) float32 at the sampling temperature, near ties (n,)."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    near_tie: torch.Tensor


def choose(logits: torch.Tensor, uniforms: torch.Tensor, temperatures: torch.Tensor, margin: float) -> Choice:
    """Decide the next token of every row.

    `logits` (n, vocabulary) of any float type; `uniforms` and `temperatures` (n,) float64. A row of temperature 0 takes its
    largest logit (the lowest id on an exact tie) and reports log-probabilities of temperature 1. A decision is near a tie
    when the uniform lies within `margin` of the edge of the chosen CDF interval, or the two largest logits of a greedy
    row within ten times `margin`. Raises FloatingPointError when a row holds NaN, +inf or no finite logit.
    """
    wide = logits.double()
    best = wide.amax(dim=-1)
    if not bool(torch.isfinite(best).all()):  # amax hands on NaN and +inf; -inf means that no token is possible
        raise FloatingPointError("logits are not finite")
    greedy = temperatures == 0
    scaled = wide / torch.where(greedy, torch.ones_like(temperatures), temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    tokens, near_tie = _inverse_cdf(logprobs, uniforms, margin)
    if bool(greedy.any()):
        top = wide.topk(min(2, wide.shape[-1]), dim=-1).values
        gap = top[:, 0] - top[:, -1]
        tokens = torch.where(greedy, wide.argmax(dim=-1), tokens)
        near_tie = torch.where(greedy, gap < GREEDY_MARGIN_FACTOR * margin, near_tie)
    return Choice(tokens, logprobs.gather(1, tokens[:, None])[:, 0].float(), near_tie)


def _inverse_cdf(logprobs: torch.Tensor, uniforms: torch.Tensor, margin: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The first id whose cumulated probability exceeds the uniform, and whether an edge of its interval is near."""
    cdf = logprobs.exp().cumsum(dim=-1)
    target = (uniforms * cdf[:, -1])[:, None]  # the total is 1 up to rounding
    tokens = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[-1] - 1)
    upper = cdf.gather(1, tokens)
    lower = torch.where(tokens > 0, cdf.gather(1, (tokens - 1).clamp_(min=0)), torch.full_like(upper, -1.0))
    last = upper >= cdf[:, -1:]  # nothing lies beyond the last interval, as nothing lies before the first
    near = ((target - lower) < margin) | (((upper - target) < margin) & ~last)
    return tokens[:, 0], near[:, 0]
