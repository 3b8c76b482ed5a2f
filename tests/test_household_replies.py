"""Which household replies are one action, and why the others are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.household.replies import REASONS, parse_reply, rejection_text

VALID = [
    ("<think>look around</think><action>look</action>", "look"),
    ("<think>a</think>\n<action>go to fridge 1</action>", "go to fridge 1"),
    ("<think>a</think>\r\n<action>go to fridge 1</action>\r\n", "go to fridge 1"),
    ("  \n\t<think>a</think>  <action>look</action>  \n", "look"),
    ("<think>a</think><action>  take mug 1 from desk 1 \n</action>", "take mug 1 from desk 1"),
    ("<think>a</think><action>\r\nlook\r\n</action>", "look"),
    ("<think></think><action>look</action>", "look"),
    ("<think>\n\n</think><action>look</action>", "look"),
    ("<think>one\ntwo\nthree</think>\n\n\n<action>inventory</action>", "inventory"),
    ("<think>2 < 3 and 4 > 1</think><action>look</action>", "look"),
    ("<think>use <b>bold</b> words</think><action>look</action>", "look"),
    ("<think>a</think><action>LOOK</action>", "LOOK"),
    ("<think>a</think><action>fly to the moon</action>", "fly to the moon"),
    ("<think>ein Gedanke über Äpfel</think><action>examine apple 1</action>", "examine apple 1"),
    ("Well.<think>a</think><action>look</action>", "look"),
    ("<think>a</think> so: <action>look</action>", "look"),
    ("<think>a</think><action>look</action> done", "look"),
    ("<think>a</think><action>look</action>\nlook again?", "look"),
    ("<think>a</think><action>heat potato 2 with microwave 1</action>", "heat potato 2 with microwave 1"),
    ("<think>action: open</think><action>close fridge 1</action>", "close fridge 1"),
]

INVALID = [
    ("", "no_action"),
    ("   \n", "no_action"),
    ("look", "no_action"),
    ("go to fridge 1", "no_action"),
    ("<think>a</think>", "no_action"),
    ("<think>a</think>look", "no_action"),
    ("<think>a</think><Action>look</Action>", "no_action"),
    ("<think>a</think>< action >look</ action >", "no_action"),
    ("<think>a</think><act>look</act>", "no_action"),
    ("<think>a</think>&lt;action&gt;look&lt;/action&gt;", "no_action"),
    ("<think>a</think>[action]look[/action]", "no_action"),
    ("<think>a</think><think>b</think>", "no_action"),
    ("<action>look</action>", "no_think"),
    ("  <action>look</action>\n", "no_think"),
    ("I think so <action>look</action>", "no_think"),
    ("<Think>a</Think><action>look</action>", "no_think"),
    ("<thinking>a</thinking><action>look</action>", "no_think"),
    ("<think>a</think><action>look</action><action>help</action>", "two_actions"),
    ("<think>a</think><action>look</action><action>look</action>", "two_actions"),
    ("<action>look</action><think>a</think><action>help</action>", "two_actions"),
    ("<action>look</action><action>help</action>", "two_actions"),
    ("<think>a</think><action>look</action> or <action></action>", "two_actions"),
    ("<think>a</think><action>look</action><think>b</think><action>help</action>", "two_actions"),
    ("<think>a</think><think>b</think><action>look</action>", "two_thinks"),
    ("<think>a</think><action>look</action><think>b</think>", "two_thinks"),
    ("<action>look</action><think>a</think>", "wrong_order"),
    ("<think>a<action>look</action>", "nested"),
    ("<think>a<action>look</action></think>", "nested"),
    ("<think>a<think>b</think></think><action>look</action>", "nested"),
    ("<think>a</think><action>look<action>help</action></action>", "nested"),
    ("<think>a</think><action><action>look</action></action>", "nested"),
    ("<think>a</think><action><think>b</think>look</action>", "nested"),
    ("<think>a", "unclosed"),
    ("<think>a</think><action>look", "unclosed"),
    ("<think>a</think><action>look<action", "unclosed"),
    ("<think>a</think><action>look</actio", "unclosed"),
    ("<think>a</think><action>look</think>", "unclosed"),
    ("a</think><action>look</action>", "unclosed"),
    ("<think>a</think>look</action>", "unclosed"),
    ("<think>a</action><action>look</action>", "unclosed"),
    ("<think>a</think></action><action>look</action>", "unclosed"),
    ("<think>a</think><action>look</action></action>", "unclosed"),
    ("<think>a</think><action>look</action></think>", "unclosed"),
    ("<think>a</think><action>look</action><action>", "unclosed"),
    ("<think>a</think><action></action>", "empty_action"),
    ("<think>a</think><action>   </action>", "empty_action"),
    ("<think>a</think><action>\r\n</action>", "empty_action"),
    ("<think>a</think><action>look</action><answer>help</answer>", "extra_tag"),
    ("<think>a</think><action>look</action> then <search>x</search>", "extra_tag"),
    ("<answer>x</answer><think>a</think><action>look</action>", "extra_tag"),
    ("<think>a</think><br/><action>look</action>", "extra_tag"),
    ("<think>a</think><action><b>look</b></action>", "extra_tag"),
    ('<think>a</think><action>look</action><tool name="x">', "extra_tag"),
]


@pytest.mark.parametrize(("text", "action"), VALID)
def test_a_reply_with_one_thought_and_one_action_is_that_action(text: str, action: str) -> None:
    parsed = parse_reply(text, cut=False)
    assert (parsed.action, parsed.invalid_reason) == (action, None)


@pytest.mark.parametrize(("text", "reason"), INVALID)
def test_an_unclear_reply_is_no_action_and_says_why(text: str, reason: str) -> None:
    parsed = parse_reply(text, cut=False)
    assert (parsed.action, parsed.invalid_reason) == (None, reason)


@pytest.mark.parametrize("text", [text for text, _ in VALID])
def test_a_cut_reply_is_invalid_even_when_it_looks_complete(text: str) -> None:
    assert parse_reply(text, cut=True).invalid_reason == "cut"


PIECES = ["<think>", "</think>", "<action>", "</action>", "look", "go to bed 1", "\n", " ", "<x>", "<"]


@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_an_action_is_always_the_text_between_the_only_pair_of_action_tags(pieces: list[str]) -> None:
    text = "".join(pieces)
    parsed = parse_reply(text, cut=False)
    if parsed.valid:
        assert text.count("<action>") == text.count("</action>") == 1
        assert text.count("<think>") == text.count("</think>") == 1
        assert text.split("<action>")[1].split("</action>")[0].strip() == parsed.action
        assert text.index("</think>") < text.index("<action>")
    else:
        assert parsed.invalid_reason in REASONS


def test_every_reason_has_its_own_answer_that_says_nothing_happened() -> None:
    answers = {rejection_text(reason) for reason in REASONS}
    assert len(answers) == len(REASONS)
    assert all(answer.startswith("Nothing happens. ") and answer.endswith(".") for answer in answers)
