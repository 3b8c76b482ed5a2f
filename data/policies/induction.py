"""Initial weights from which a tiny transformer learns to copy within minutes instead of hours.

What the household asks of a small model is looking names up: is the mug among what I just saw, and which number stands
behind it? Attention learns that late when it starts from noise. So the first layer starts with heads that look a fixed
number of tokens back (a constant query and key that the rotary embedding turns into a position offset), and later layers
start with heads that look for the place whose preceding token is the present one (induction heads) or for the present token
itself, and copy what stands there. Everything is still trained; nothing of the task is written in. Close in spirit to
mimetic initialisation (Trockman and Kolter, arXiv 2305.09828).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

OFFSETS = (1, 1, 2, 3)  # tokens back, one per head of the first layer
PEAK = (25.0, 20.0, 10.0, 5.0)  # squared strength of the fastest rotary frequencies: sharp at the offset
MATCH = math.sqrt(7.0)  # scale of queries and keys of induction heads
SAME = 2.0  # scale of queries and keys of heads that match the token itself
COPY = 0.1  # scale of what heads add to the residual stream
EMBEDDING_STD, MATRIX_STD = 0.05, 0.02
SPAN = 300.0  # positions over which a match must hold


def initialise(model: LlamaForCausalLM, seed: int) -> None:
    """Overwrite the weights in place. The model has biases in its attention, 4 heads and as many key-value heads."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    heads, width = config.num_attention_heads, config.hidden_size
    size = width // heads
    theta = config.rope_parameters["rope_theta"]
    frequencies = torch.tensor([theta ** (-2 * pair / size) for pair in range(size // 2)])

    def subspace() -> Tensor:
        """`(size, width)`, orthonormal rows."""
        return torch.linalg.qr(torch.randn(width, size, generator=generator))[0].T.contiguous()

    reads, writes = [subspace() for _ in range(heads)], [subspace() for _ in range(heads)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                std = EMBEDDING_STD if "embed" in name else MATRIX_STD
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        first, *later = (layer.self_attn for layer in model.model.layers)
        for head in range(heads):
            rows = slice(head * size, (head + 1) * size)
            strength = torch.zeros(size // 2)
            strength[: len(PEAK)] = torch.tensor(PEAK).sqrt()
            angle = -frequencies * OFFSETS[head % len(OFFSETS)]
            first.k_proj.bias[rows] = torch.cat([strength, torch.zeros(size // 2)])
            first.q_proj.bias[rows] = torch.cat([strength * angle.cos(), strength * angle.sin()])
            first.v_proj.weight[rows] = reads[head]
            first.o_proj.weight[:, rows] = COPY * writes[head].T
        slow = (frequencies * SPAN < 2 * math.pi).repeat(2).float().unsqueeze(-1)  # dimensions that hardly rotate
        for attention in later:
            for head in range(heads):
                rows = slice(head * size, (head + 1) * size)
                own, copied = subspace(), subspace()
                induction = head < heads // 2
                attention.q_proj.weight[rows] += slow * (MATCH * reads[head] if induction else SAME * own)
                attention.k_proj.weight[rows] += slow * (MATCH * writes[head] if induction else SAME * own)
                attention.v_proj.weight[rows] = copied
                attention.o_proj.weight[:, rows] = COPY * copied.T
