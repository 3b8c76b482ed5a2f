"""Decoding with transformers' own cache, for models the slot pool cannot serve (sliding windows, hybrid layers, ...).

Prompts are padded on the left and computed anew at every call; finished rows stay in the batch until the last one stops.
"""

from __future__ import annotations

import torch

from stages.engines.reply import Reply
from stages.engines.slot_decoding import cache_argument


class PaddedDecoder:
    """A `Decoder` on stock caches; `rows` bounds the batch (1 where even padding changes what the model computes)."""

    def __init__(self, module: torch.nn.Module, rows: int) -> None:
        self.module, self.rows = module, rows
        self._cache_argument = cache_argument(module)
        self._cache = None
        self._mask: torch.Tensor | None = None
        self._replies: list[Reply] = []

    def rows_at_once(self, longest: int) -> int:
        return self.rows

    def clear(self) -> None:
        self._cache, self._mask, self._replies = None, None, []

    def begin_call(self) -> None:
        """Nothing is kept between calls."""

    def start(self, replies: list[Reply]) -> torch.Tensor:
        """See `Decoder.start`."""
        device = next(self.module.parameters()).device
        longest = max(len(reply.ids) for reply in replies)
        ids = [[0] * (longest - len(reply.ids)) + reply.ids for reply in replies]
        mask = [[0] * (longest - len(reply.ids)) + [1] * len(reply.ids) for reply in replies]
        for row, reply in enumerate(replies):
            reply.slot = row
        self._replies, self._cache = replies, None
        self._mask = torch.tensor(mask, device=device)
        positions = (self._mask.cumsum(dim=-1) - 1).clamp_(min=0)
        return self._forward(torch.tensor(ids, device=device), positions)

    def step(self, live: list[Reply]) -> torch.Tensor:
        """See `Decoder.step`."""
        assert self._mask is not None
        device = self._mask.device
        self._mask = torch.cat([self._mask, self._mask.new_ones((len(self._replies), 1))], dim=1)
        ids = torch.tensor([[reply.ids[-1]] for reply in self._replies], device=device)
        positions = self._mask.sum(dim=-1, keepdim=True) - 1
        return self._forward(ids, positions)[torch.tensor([reply.slot for reply in live], device=device)]

    def finish(self, replies: list[Reply]) -> None:
        """See `Decoder.finish`."""
        self.clear()

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # A mask of ones is left out: models without padding support then still serve a batch of equal lengths.
        padded = not bool(self._mask.all())
        output = self.module(
            input_ids=ids,
            attention_mask=self._mask if padded else None,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
        )
        self._cache = getattr(output, self._cache_argument)
        return output.logits[:, -1]
