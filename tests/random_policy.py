"""A tiny random Qwen2 model with a tokenizer, and random training rows, for tests of checkpoints and of the learner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from stages.packing import TrainRow

VOCABULARY = 61
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_policy(
    directory: Path, *, seed: int = 0, tied: bool = True, hidden: int = 24, words: int = VOCABULARY
) -> Path:
    """A model directory in the Hugging Face layout; equal seeds give equal bytes."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    special = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<unk>"]
    vocabulary = {word: index for index, word in enumerate(special + [f"w{index}" for index in range(words - 5)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|end|>", pad_token="<|end|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return directory


def random_rows(
    count: int, *, seed: int = 0, longest: int = 24, skills: int = 2, teacher: bool = True
) -> list[TrainRow]:
    """`count` rollout rows and `skills` skill rows; every third rollout row has no teacher."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(count + skills):
        length = int(generator.integers(4, longest))
        token_ids = generator.integers(0, VOCABULARY, length).astype(np.int32)
        sampled = generator.random(length) < 0.5
        sampled[0], sampled[-1] = False, True
        sampled_tokens = int(sampled.sum())
        is_skill = index >= count
        taught = teacher and not is_skill and index % 3 != 2
        prefix = generator.integers(0, VOCABULARY, 3).astype(np.int32)
        rows.append(
            TrainRow(
                kind="skill" if is_skill else "rollout",
                row_id=f"row{index}",
                token_ids=token_ids,
                sampled=sampled,
                temperature=0.8,
                behaviour_logprobs=np.full(sampled_tokens, -4.0, np.float32),
                advantage=float(generator.normal()),
                trust=float(generator.uniform(0, 2)),
                skill_reward=float(generator.normal()) if is_skill else None,
                teacher_token_ids=np.concatenate([prefix, token_ids]) if taught else None,
                teacher_sampled=np.concatenate([np.zeros(3, np.bool_), sampled]) if taught else None,
            )
        )
    return rows
