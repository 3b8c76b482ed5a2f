"""Answers are scored as the field scores them, and the three scores agree where they must."""

from __future__ import annotations

import math
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.search.scoring import exact_match, f1, normalise, substring_match

WORDS = st.lists(st.sampled_from(["rome", "paris", "the", "new", "york", "a", "1969"]), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Beatles", "beatles"),
        ("  An   apple, a day!  ", "apple day"),
        ("U.S.A.", "usa"),
        ("theatre and anthem", "theatre and anthem"),
        ("Don't", "dont"),
        ("Ångström", "ångström"),
        ("the a an", ""),
        ("12,000 km", "12000 km"),
        ("tab\tand\nline", "tab and line"),
    ],
)
def test_normalisation_lowers_and_drops_punctuation_articles_and_extra_blanks(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("answer", "golds", "em", "substring", "score"),
    [
        ("Rome", ["Rome"], True, True, 1.0),
        ("the city of Rome", ["Rome"], False, True, 0.5),  # "city of rome": p = 1/3, r = 1
        ("Rome", ["Paris", "ROME!"], True, True, 1.0),
        ("Paris", ["Rome"], False, False, 0.0),
        ("", ["Rome"], False, False, 0.0),
        ("the", ["a"], False, False, 0.0),  # nothing is left of either
        ("New York City", ["York New"], False, False, 0.8),  # order: p = 2/3, r = 1
        ("Romeo", ["Rome"], False, True, 0.0),
        ("york york", ["york"], False, True, 2 / 3),  # p = 1/2, r = 1
    ],
)
def test_scores_of_known_answers(answer: str, golds: list[str], em: bool, substring: bool, score: float) -> None:
    assert exact_match(answer, golds) is em
    assert substring_match(answer, golds) is substring
    assert math.isclose(f1(answer, golds), score)


@given(WORDS, st.lists(WORDS, min_size=1, max_size=3))
def test_an_exact_match_has_f1_one_and_is_a_substring_match(answer: list[str], golds: list[list[str]]) -> None:
    given_, wanted = " ".join(answer), [" ".join(gold) for gold in golds]
    score = f1(given_, wanted)
    assert 0.0 <= score <= 1.0
    if exact_match(given_, wanted):
        assert score == 1.0 and substring_match(given_, wanted)
    if substring_match(given_, wanted):
        assert score > 0.0
    assert f1(given_, wanted) == max(f1(given_, [gold]) for gold in wanted)


@given(WORDS, st.sampled_from(string.punctuation), st.integers(0, 3))
def test_case_punctuation_and_articles_do_not_matter(answer: list[str], mark: str, position: int) -> None:
    text = " ".join(answer)
    noisy = " ".join([*answer[:position], "The", *answer[position:]]).upper() + mark
    assert normalise(noisy) == normalise(text)
    assert exact_match(noisy, [text]) is bool(normalise(text))
