"""Train the bundled search policy from scratch: `python -m data.policies.train_search_tiny --out DIR`.

Encyclopaedias are generated, searched by the scripted searcher and turned into conversations. For how it trains see
`data.policies.training`.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from data.policies.search_corpus import example
from data.policies.tokenizer import train_tokenizer
from data.policies.training import Corpus, run
from data.search.names import name_words

TAGS = ("<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>")
VOCABULARY = 2048


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Fit the tokenizer to a sample of the corpus and every word that a title can have."""
    texts = [message.content for index in range(1200) for message in example(seed, 1_536_000 + index)]
    return train_tokenizer(texts, [f" {word}" for word in name_words()], TAGS, VOCABULARY)


CORPUS = Corpus(example, build_tokenizer, context_weight=0.1)

if __name__ == "__main__":
    run(CORPUS, __doc__)
