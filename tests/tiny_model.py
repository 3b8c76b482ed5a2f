"""A random tiny Qwen2 model with a byte-level BPE tokenizer and a ChatML template: real code paths in milliseconds."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A second family: begin-of-sequence, headers, trimmed contents, no newline after the end of a turn.
HEADERS = (
    "<|bos|>{% for message in messages %}<|header|>{{ message['role'] }}<|end_header|>\n\n"
    "{{ message['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|end_header|>\n\n{% endif %}"
)
# A thinking family: thoughts of earlier turns disappear as soon as another user message follows.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "You are in the middle of a room. Looking quickly around you, you see a fridge 1, a desk 2, and a cabinet 3.",
    "<think>I need to find the mug.</think><action>go to fridge 1</action>",
    "Your task is to: put a clean mug in cabinet. Nothing happens. You open the fridge 1. The fridge 1 is open.",
    '{"summary": "found it", "skill": "look into the fridge first, then clean the mug"}',
]


def tiny_tokenizer(template: str | None = CHATML, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A tokenizer of about 300 ids, the same at every call; `eos` is its end-of-sequence token."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|header|>", "<|end_header|>", "<|eot|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, pad_token="<|endoftext|>", extra_special_tokens=special
    )
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def tiny_module(
    vocabulary_size: int = 320,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    context: int = 4096,
    scale: float = 4.0,
) -> Qwen2ForCausalLM:
    """A random model in float32; `scale` times the usual output weights make its distributions far from flat."""
    config = Qwen2Config(
        vocab_size=vocabulary_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Qwen2ForCausalLM(config)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if "norm" not in name:
                    parameter.mul_(scale)
    return module.eval().requires_grad_(False)


def save_tiny(directory: Path, *, seed: int = 0) -> Path:
    """The tiny model and tokenizer in HF layout, in `directory`."""
    tiny_module(seed=seed).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory
