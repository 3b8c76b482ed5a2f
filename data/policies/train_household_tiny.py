"""Train the bundled household policy from scratch: `python -m data.policies.train_household_tiny --out DIR`.

Games are generated, played by the scripted player and turned into conversations. For how it trains see
`data.policies.training`.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from data.household.catalog import catalog
from data.policies.household_corpus import example
from data.policies.tokenizer import train_tokenizer
from data.policies.training import Corpus, run

TAGS = ("<think>", "</think>", "<action>", "</action>")
VOCABULARY = 1024


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Fit the tokenizer to a sample of the corpus, every class name and small number."""
    known = catalog()
    names = {name.lower() for name in known.contents} | {n.lower() for held in known.contents.values() for n in held}
    texts = [message.content for index in range(600) for message in example(seed, 10_000_000 + index)]
    words = sorted(names | {str(number) for number in range(1, 41)})
    return train_tokenizer(texts, [*words, *(f" {word}" for word in words)], TAGS, VOCABULARY)


CORPUS = Corpus(example, build_tokenizer)

if __name__ == "__main__":
    run(CORPUS, __doc__)
