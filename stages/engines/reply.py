"""One reply while it is being sampled: its request, the ids so far, and where its keys and values lie."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from stages.engines import GenerationRequest, GenerationResult
from stages.engines.sampling import reply_uniforms


class Reply:
    """A growing reply. `ids` holds the prompt and every sampled id; `slot` and `stored` belong to the decoder."""

    def __init__(self, index: int, request: GenerationRequest) -> None:
        self.index = index
        self.request = request
        self.ids = list(request.prompt_ids)
        self.prompt_length = len(self.ids)
        self.logprobs: list[float] = []
        self.stop_reason: str | None = None
        self.slot = -1
        self.stored = 0  # leading ids whose keys and values are in the cache before the prefill
        self._uniforms = reply_uniforms(request.seed, request.max_new_tokens).tolist()

    @property
    def longest(self) -> int:
        """Length of prompt and reply when the reply runs to its limit."""
        return self.prompt_length + self.request.max_new_tokens

    @property
    def uniform(self) -> float:
        """The uniform that decides the next token."""
        return self._uniforms[len(self.logprobs)]

    def append(self, token: int, logprob: float, eos_ids: Collection[int]) -> None:
        """Take the next sampled token; sets `stop_reason` when it ends the reply."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in eos_ids:
            self.stop_reason = "eos"
        elif len(self.logprobs) == self.request.max_new_tokens:
            self.stop_reason = "length"

    def result(self) -> GenerationResult:
        """What the engine hands back. The reply must have stopped."""
        assert self.stop_reason is not None
        return GenerationResult(self.ids[self.prompt_length :], self.logprobs, self.stop_reason)


class Decoder(Protocol):
    """How next-token logits of a batch of replies are computed and cached."""

    def rows_at_once(self, longest: int) -> int:
        """How many replies of `longest` tokens the decoder can hold together."""

    def begin_call(self) -> None:
        """One more call of `Engine.generate` begins."""

    def start(self, replies: list[Reply]) -> torch.Tensor:
        """Prefill; next-token logits (replies, vocabulary) in the order of `replies`."""

    def step(self, live: list[Reply]) -> torch.Tensor:
        """Feed the last id of every live reply; next-token logits in the order of `live`."""

    def finish(self, replies: list[Reply]) -> None:
        """All replies of `start` have stopped."""

    def clear(self) -> None:
        """Forget everything kept between calls."""
