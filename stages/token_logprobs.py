"""Log-probabilities of sampled tokens without a second copy of the logits: method section 3, first paragraph.

A `(B, T, V)` tensor of logits is the largest tensor of a training step. `token_logprobs` takes it as it is and works through
it in slices along T, in float32 (float64 for float64 logits), saving only one number a token for the backward pass; `head_logprobs` never has it whole:
it applies the output head slice by slice and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from schemas.errors import ConfigError

CHUNK_TOKENS = 128  # places along T that are worked on at once


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, chunk: int) -> Tensor:
        pieces, normalisers = [], []
        for start in range(0, targets.shape[1], chunk):
            scaled = _working(logits[:, start : start + chunk]) / temperature
            wanted = targets[:, start : start + chunk]
            normaliser = torch.logsumexp(scaled, dim=-1)
            chosen = scaled.gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            pieces.append(torch.where(wanted >= 0, chosen - normaliser, 0.0))
            normalisers.append(normaliser)
        ctx.save_for_backward(logits, targets, torch.cat(normalisers, dim=1))
        ctx.temperature, ctx.chunk = temperature, chunk
        return torch.cat(pieces, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, normalisers = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)
        for start in range(0, targets.shape[1], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            wanted = targets[:, part]
            upstream = torch.where(wanted >= 0, grad_output[:, part] / ctx.temperature, 0.0).unsqueeze(-1)
            # upstream * (one_hot(target) - softmax), built in one slice-sized buffer.
            grad = _working(logits[:, part]) / ctx.temperature
            grad.sub_(normalisers[:, part].unsqueeze(-1)).exp_()
            grad.mul_(-upstream)
            grad.scatter_add_(-1, wanted.clamp(min=0).unsqueeze(-1), upstream)
            # Padding may hold infinities, where 0 * NaN would be NaN.
            grad_logits[:, part] = grad.masked_fill_(upstream == 0.0, 0.0).to(logits.dtype)
        return grad_logits, None, None, None


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """log softmax(logits / temperature) at the targets, `(B, T)`, with gradient; float32, or float64 for float64 logits.

    `logits` `(B, T, V)` in any float type, aligned with `targets` `(B, T)` (the caller shifts); a negative target marks
    padding: value 0, gradient exactly 0, whatever the logits there. Beyond its output and the gradient of the logits it
    holds `B * chunk_tokens * V` float32 numbers. Raises ConfigError for a temperature that is not positive.

    >>> logits = torch.log(torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]))
    >>> [round(value, 4) for value in token_logprobs(logits, torch.tensor([[1, -1]])).flatten().tolist()]  # log 0.75
    [-0.2877, 0.0]
    """
    _check(temperature, chunk_tokens)
    if targets.shape[1] == 0:
        return _working(logits.sum(-1))  # (B, 0), connected to the graph
    return _TokenLogprobs.apply(logits, targets, float(temperature), chunk_tokens)


def head_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """As `token_logprobs(head(hidden), ...)`, without ever holding the logits of more than one slice.

    `hidden` `(B, T, H)` are the final hidden states, `head` maps them to logits `(..., V)` place by place. The backward pass
    calls `head` once more for each slice.
    """
    _check(temperature, chunk_tokens)

    def slice_logprobs(hidden_slice: Tensor, wanted: Tensor) -> Tensor:
        return token_logprobs(head(hidden_slice), wanted, temperature, chunk_tokens)

    pieces = []
    for start in range(0, targets.shape[1], chunk_tokens):
        part = slice(start, start + chunk_tokens)
        pieces.append(checkpoint(slice_logprobs, hidden[:, part], targets[:, part], use_reentrant=False))
    return torch.cat(pieces, dim=1) if pieces else _working(hidden.sum(-1))


def _working(logits: Tensor) -> Tensor:
    """Half precision as float32; float32 and float64 as they are."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _check(temperature: float, chunk_tokens: int) -> None:
    if not temperature > 0.0:
        raise ConfigError("temperature of log-probabilities out of range", expected="> 0", found=temperature)
    if chunk_tokens < 1:
        raise ConfigError("chunk of log-probabilities out of range", expected=">= 1", found=chunk_tokens)
