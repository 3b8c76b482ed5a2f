"""How answers are scored: exact match, token F1 and substring match after the usual QA normalisation (method section 4).

Lower case, no punctuation, no articles, single spaces; any of the gold answers counts. The rules are those of SQuAD's
evaluation (Rajpurkar et al., arXiv 1606.05250). A gold answer of which nothing is left matches nothing.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """The form in which answers are compared.

    >>> normalise("  The  Tower, of London! ")
    'tower of london'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golds: Sequence[str]) -> bool:
    """Whether the answer equals a gold answer.

    >>> exact_match("the Tower of London", ["Big Ben", "Tower of London"])
    True
    """
    given = normalise(answer)
    return bool(given) and any(given == normalise(gold) for gold in golds)


def f1(answer: str, golds: Sequence[str]) -> float:
    """The best F1 of the answer's words against a gold answer's, in [0, 1].

    precision = common / words of the answer, recall = common / words of the gold answer, F1 = 2 p r / (p + r).

    >>> f1("Tower of London, England", ["Tower of London"])  # p = 3/4, r = 1
    0.8571428571428571
    """
    return max((_f1(normalise(answer).split(), normalise(gold).split()) for gold in golds), default=0.0)


def _f1(given: Sequence[str], gold: Sequence[str]) -> float:
    common = (Counter(given) & Counter(gold)).total()
    return 2 * common / (len(given) + len(gold)) if common else 0.0


def substring_match(answer: str, golds: Sequence[str]) -> bool:
    """Whether a gold answer occurs in the answer.

    >>> substring_match("It is the Tower of London.", ["tower of london"])
    True
    """
    given = normalise(answer)
    return any(gold in given for gold in map(normalise, golds) if gold)
