"""Train a bundled small policy from scratch on generated conversations: what the policies' scripts have in common.

Reads nothing but the package; writes a HF model directory and, every few updates, `state.safetensors` beside it, from which
the same command goes on. Deterministic for a seed, a thread count and a torch version. The loss is the next-token loss on the
policy's own replies, plus a small weight on what it reads: predicting a text exercises copying names, which is what is hard
for so small a model. Gate the result on free-running success (`rsipo evaluate`), never on the loss.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from data.policies.conversations import Conversation
from data.policies.induction import initialise

ROPE_THETA = 1e6  # slow rotations in most dimensions: matching a name must not depend on how far away it stands
Encoded = tuple[np.ndarray, np.ndarray]  # token ids (L,), loss weights of predicting each (L,)


@dataclass(frozen=True)
class Corpus:
    """Where a policy's training text comes from. Both functions stand at the top level of a module: other processes call them.

    `example(seed, index)` is the conversation number `index`; `tokenizer(seed)` is fitted to a sample of them."""

    example: Callable[[int, int], Conversation]
    tokenizer: Callable[[int], PreTrainedTokenizerFast]
    context_weight: float = 0.2  # loss weight of what the policy reads
    shard_examples: int = 1536


@dataclass(frozen=True)
class Settings:
    seed: int
    updates: int
    batch_tokens: int
    muon_lr: float
    adam_lr: float
    hidden: int
    layers: int
    heads: int
    intermediate: int
    warmup: int = 50


def encode(conversation: Conversation, tokenizer: PreTrainedTokenizerFast, context_weight: float) -> Encoded:
    """Ids as the episode loop would build them (message by message), and a weight per id."""
    ids: list[int] = []
    weights: list[float] = []
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    for message in conversation:
        content = tokenizer.encode(message.content, add_special_tokens=False)
        ids += [tokenizer.convert_tokens_to_ids(f"<|{message.role}|>"), *content, end]
        own = 1.0 if message.loss else 0.0 if message.role == "assistant" else context_weight
        weights += [0.0, *[own] * len(content), own if message.role == "assistant" else 0.0]
    return np.array(ids, np.int32), np.array(weights, np.float32)


def shard(corpus: Corpus, seed: int, number: int, tokenizer_dir: str) -> list[Encoded]:
    """The examples [number * shard_examples, ...) encoded; a pure function, run in another process."""
    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    first = number * corpus.shard_examples
    indices = range(first, first + corpus.shard_examples)
    return [encode(corpus.example(seed, index), tokenizer, corpus.context_weight) for index in indices]


def batches(encoded: list[Encoded], batch_tokens: int, seed: int) -> list[list[Encoded]]:
    """Batches of similar lengths, at most `batch_tokens` padded tokens each, in a shuffled order."""
    order = sorted(range(len(encoded)), key=lambda i: (len(encoded[i][0]), i))
    groups: list[list[Encoded]] = [[]]
    for i in order:
        if (len(groups[-1]) + 1) * len(encoded[i][0]) > batch_tokens:
            groups.append([])
        groups[-1].append(encoded[i])
    shuffled = np.random.default_rng(seed).permutation(len(groups))
    return [groups[i] for i in shuffled]


def collate(group: list[Encoded]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids (B, T) and weights (B, T)."""
    length = max(len(ids) for ids, _ in group)
    ids, weights = np.zeros((len(group), length), np.int64), np.zeros((len(group), length), np.float32)
    for row, (own, weight) in enumerate(group):
        ids[row, : len(own)], weights[row, : len(own)] = own, weight
    return torch.from_numpy(ids), torch.from_numpy(weights)


def build_model(settings: Settings, vocabulary: int, eos: int, pad: int) -> LlamaForCausalLM:
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        eos_token_id=eos,
        pad_token_id=pad,
        bos_token_id=None,
        attention_dropout=0.0,
    )
    model = LlamaForCausalLM(config).float()
    initialise(model, settings.seed)
    return model


def optimizers(model: LlamaForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices (copying heads form several times sooner), AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=settings.muon_lr, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=settings.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def lr_factor(update: int, settings: Settings) -> float:
    """Warm-up, then a cosine to 2 %."""
    if update < settings.warmup:
        return (update + 1) / settings.warmup
    progress = (update - settings.warmup) / max(1, settings.updates - settings.warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def weighted_loss(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Weighted mean next-token loss, and the plain mean over the policy's own tokens."""
    hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
    keep = weights[:, 1:] > 0
    logits = model.lm_head(hidden[keep])
    losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:][keep], reduction="none")
    weight = weights[:, 1:][keep]
    own = losses.detach()[weight == 1.0]
    return (losses * weight).sum() / weight.sum(), float(own.mean()) if len(own) else float("nan")


def stream(corpus: Corpus, settings: Settings, tokenizer_dir: Path, start: int) -> Iterator[tuple[int, list[Encoded]]]:
    """(update, batch) from `start` on; the next shard is made in the background while this one trains."""
    with ProcessPoolExecutor(1) as pool:
        ahead: list[Future[list[Encoded]]] = []
        number, update = 0, 0
        while True:
            while len(ahead) < 2:
                ahead.append(pool.submit(shard, corpus, settings.seed, number + len(ahead), str(tokenizer_dir)))
            groups = batches(ahead.pop(0).result(), settings.batch_tokens, settings.seed + number)
            number += 1
            for group in groups:
                if update >= start:
                    yield update, group
                update += 1


def save_state(path: Path, model: LlamaForCausalLM, optimizers_: list[torch.optim.Optimizer], update: int) -> None:
    """Everything a resumed run needs, as one safetensors file written atomically."""
    tensors = {f"model.{name}": p.detach().clone() for name, p in model.named_parameters()}
    for number, optimizer in enumerate(optimizers_):
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
    temporary = path.with_suffix(".tmp")
    save_file({k: v.contiguous() for k, v in tensors.items()}, temporary, metadata={"update": str(update)})
    os.replace(temporary, path)


def load_state(path: Path, model: LlamaForCausalLM, optimizers_: list[torch.optim.Optimizer]) -> int:
    """Restore `save_state`'s file; returns the update to go on with."""
    from safetensors import safe_open

    tensors = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    for number, optimizer in enumerate(optimizers_):
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            if key.startswith(f"optimizer.{number}."):
                _, _, index, name = key.split(".", 3)
                state.setdefault(int(index), {})[name] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    with safe_open(path, framework="pt") as handle:
        return int(handle.metadata()["update"])


def train(corpus: Corpus, settings: Settings, out: Path, save_every: int) -> None:
    """Train to `settings.updates`, resuming from `out/state.safetensors` when it is there."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer_dir = out / "model"
    if not (tokenizer_dir / "tokenizer.json").exists():
        corpus.tokenizer(settings.seed).save_pretrained(tokenizer_dir)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    model = build_model(settings, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    both = optimizers(model, settings)
    state_path = out / "state.safetensors"
    start = load_state(state_path, model, both) if state_path.exists() else 0
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens, from update {start}",
        flush=True,
    )
    base = [settings.muon_lr, settings.adam_lr]
    clock, seen, recent = time.monotonic(), 0, []
    for update, group in stream(corpus, settings, tokenizer_dir, start):
        if update >= settings.updates:
            break
        for optimizer, lr in zip(both, base, strict=True):
            for parameters in optimizer.param_groups:
                parameters["lr"] = lr * lr_factor(update, settings)
        ids, weights = collate(group)
        loss, own = weighted_loss(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen, recent = seen + ids.numel(), [*recent[-49:], own]
        if (update + 1) % 50 == 0:
            speed = seen / (time.monotonic() - clock)
            print(
                json.dumps(
                    {
                        "update": update + 1,
                        "own_loss": round(float(np.nanmean(recent)), 4),
                        "tokens_per_second": round(speed),
                    }
                ),
                flush=True,
            )
        if (update + 1) % save_every == 0 or update + 1 == settings.updates:
            save_state(state_path, model, both, update + 1)
            model.save_pretrained(out / "model", safe_serialization=True)


def run(corpus: Corpus, description: str, arguments: Sequence[str] | None = None) -> None:
    """The command line of a policy's script."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=6000)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=250)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    disable_progress_bar()
    settings = Settings(
        options.seed, options.updates, options.batch_tokens, options.muon_lr, options.adam_lr,
        options.hidden, options.layers, options.heads, options.intermediate,
    )  # fmt: skip
    train(corpus, settings, options.out, options.save_every)
