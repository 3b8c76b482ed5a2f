"""The forward pass of training: log-probabilities of sampled tokens, and nothing else of the logits.

The hidden states at the places that predict a sampled token are picked out first; the output head sees only those, in
pieces. With several pieces the backward pass applies the head again, so that one piece of logits is held at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schemas.errors import ConfigError
from stages.token_logprobs import token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "policy."


class PolicyForward(nn.Module):
    """A causal language model that returns log pi(target | tokens before it) at a temperature."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.policy = policy

    def forward(
        self, token_ids: Tensor, batch_index: Tensor, position: Tensor, targets: Tensor, temperature: float, chunks: int
    ) -> Tensor:
        """`token_ids` `(B, L)` padded on the right; `(N,)` log-probabilities of `targets` at `(batch_index, position)`.

        No attention mask is needed: causal attention never reaches the padding at a row's end. `chunks` is the number
        of pieces, whatever N is, because under ZeRO-3 each use of the head is a collective operation.
        """
        hidden = self.policy.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        flat = hidden.reshape(-1, hidden.shape[-1])
        chosen = flat.index_select(0, batch_index * token_ids.shape[1] + position)
        head = self.policy.get_output_embeddings()

        def piece_logprobs(states: Tensor, wanted: Tensor) -> Tensor:
            return token_logprobs(head(states).unsqueeze(0), wanted.unsqueeze(0), temperature).squeeze(0)

        if chunks <= 1:
            return piece_logprobs(chosen, targets)
        pieces = zip(chosen.tensor_split(chunks), targets.tensor_split(chunks), strict=True)
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(piece_logprobs, *piece, use_reentrant=False) for piece in pieces])
        return torch.cat([piece_logprobs(*piece) for piece in pieces])


def prepare_policy(model: PreTrainedModel, *, gradient_checkpointing: bool) -> PolicyForward:
    """The model ready for training: dropout off, no cache, its head checked. ConfigError if it cannot be used."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.config.use_cache = False
    _check_head(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # gradient checkpointing is tied to training mode; with dropout off nothing else is
    return PolicyForward(model)


def _check_head(model: PreTrainedModel) -> None:
    """Some models scale or cap their logits after the head; their log-probabilities would be wrong here."""
    model.eval()
    rows = int(model.get_input_embeddings().weight.shape[0])
    tokens = (torch.arange(8) * 31 % rows).unsqueeze(0)
    with torch.no_grad():
        whole = model(input_ids=tokens, use_cache=False).logits
        parts = model.get_output_embeddings()(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
    if whole.shape != parts.shape or not torch.allclose(whole.float(), parts.float(), rtol=1e-3, atol=1e-3):
        raise ConfigError(
            "the model changes its logits after the output head",
            where="model.path",
            expected="logits = head(hidden states), as in Llama and Qwen models",
            found=model.config.model_type,
        )
