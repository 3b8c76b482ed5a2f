"""The bundled policies' tokenizers: byte-level BPE whose merges make every word of a policy's world one token.

Lossless on any text (bytes are the fallback), with the tags of the reply format and the three chat markers as single tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MARKERS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], extra_words: Iterable[str], tags: Sequence[str], vocabulary: int
) -> PreTrainedTokenizerFast:
    """Train on the words of `texts` plus `extra_words` (with a leading space where that belongs to the token).

    `tags` become one token each; `vocabulary` is the number of tokens besides them. Every word counts alike."""
    words: Counter[str] = Counter()
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    for text in texts:
        for tag in tags:
            text = text.replace(tag, "\n")
        words.update(text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text))
    words.update(extra_words)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Rare words count as much as frequent ones: what matters is that each is one token.
    tokenizer.train_from_iterator((word for word in sorted(words) for _ in range(20)), trainer=trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
