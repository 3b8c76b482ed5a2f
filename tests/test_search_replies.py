"""Which search replies are one search or one answer, and why the others are neither."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.environments import ParsedReply
from data.search.replies import FORMAT, parse_reply, split_action

VALID = [
    ("<think>who?</think><search>Mira Kolben</search>", "search: Mira Kolben"),
    ("<think>who?</think>\n<answer>Tarvold</answer>", "answer: Tarvold"),
    ("<think></think><search>a</search>", "search: a"),
    ("<think>a</think><search> capital \n of  France\t</search>", "search: capital of France"),
    ("<think>a</think>\r\n<answer>\r\nRome\r\n</answer>\r\n", "answer: Rome"),
    ("Well: <think>a</think> so <search>b</search> now", "search: b"),
    ("<think>1 < 2 and <b>bold</b></think><answer>3</answer>", "answer: 3"),
    ("<think>I could use search or answer</think><search>b</search>", "search: b"),
    ("<think>a</think><answer>search: me</answer>", "answer: search: me"),
    ("<think>a</think><search>answer</search>", "search: answer"),
    ("<think>ein Gedanke</think><answer>Zürich</answer>", "answer: Zürich"),
    ("<think>a</think><answer>x < y</answer>", "answer: x < y"),
]

INVALID = [
    ("", "no_action"),
    ("  \n ", "no_action"),
    ("Rome", "no_action"),
    ("search: Rome", "no_action"),
    ("<think>a</think>", "no_action"),
    ("<think>a</think>Rome", "no_action"),
    ("<think>a</think><Search>b</Search>", "no_action"),
    ("<think>a</think><ANSWER>b</ANSWER>", "no_action"),
    ("<think>a</think>< search >b</ search >", "no_action"),
    ("<think>a</think>&lt;search&gt;b&lt;/search&gt;", "no_action"),
    ("<think>a</think>[search]b[/search]", "no_action"),
    ("<think>a</think><query>b</query>", "no_action"),
    ("<think>a</think><searching>b</searching>", "no_action"),
    ("<think>a</think><information>b</information>", "no_action"),
    ("<think>a</think><think>b</think>", "no_action"),
    ("<search>b</search>", "no_think"),
    ("<answer>b</answer>", "no_think"),
    ("I think so. <answer>b</answer>", "no_think"),
    ("<Think>a</Think><answer>b</answer>", "no_think"),
    ("<reasoning>a</reasoning><search>b</search>", "no_think"),
    ("<think>a</think><search>b</search><answer>c</answer>", "two_actions"),
    ("<think>a</think><answer>b</answer><search>c</search>", "two_actions"),
    ("<think>a</think><search>b</search><search>c</search>", "two_actions"),
    ("<think>a</think><answer>b</answer><answer>b</answer>", "two_actions"),
    ("<search>b</search><think>a</think><answer>c</answer>", "two_actions"),
    ("<think>a</think><search>b</search><information>c</information><answer>d</answer>", "two_actions"),
    ("<think>a</think><search>b</search><think>c</think><answer>d</answer>", "two_actions"),
    ("<search>b</search><answer>c</answer>", "two_actions"),
    ("<think>a</think><search></search><answer></answer>", "two_actions"),
    ("<think>a</think><think>b</think><search>c</search>", "two_thinks"),
    ("<think>a</think><answer>b</answer><think>c</think>", "two_thinks"),
    ("<search>b</search><think>a</think>", "wrong_order"),
    ("<answer>b</answer><think>a</think>", "wrong_order"),
    ("<think>a<search>b</search></think>", "nested"),
    ("<think>a<search>b</search>", "nested"),
    ("<think>a<think>b</think></think><answer>c</answer>", "nested"),
    ("<think>a</think><search>b<answer>c</answer></search>", "nested"),
    ("<think>a</think><answer><search>b</search></answer>", "nested"),
    ("<think>a</think><search>b<search>c</search></search>", "nested"),
    ("<think>a</think><answer><think>b</think>c</answer>", "nested"),
    ("<think>a", "unclosed"),
    ("<think>a</think><search>b", "unclosed"),
    ("<think>a</think><answer>b</answe", "unclosed"),
    ("<think>a</think><search>b</answer>", "unclosed"),
    ("<think>a</think><answer>b</search>", "unclosed"),
    ("<think>a</think><search>b</think>", "unclosed"),
    ("<think>a</search><answer>b</answer>", "unclosed"),
    ("a</think><search>b</search>", "unclosed"),
    ("<think>a</think>b</search>", "unclosed"),
    ("<think>a</think><search>b</search></search>", "unclosed"),
    ("<think>a</think><answer>b</answer><answer>", "unclosed"),
    ("<think>a</think><search></search>", "empty_action"),
    ("<think>a</think><answer> \n\t </answer>", "empty_action"),
    ("<think>a</think><search>b</search><information>c</information>", "extra_tag"),
    ("<information>c</information><think>a</think><answer>b</answer>", "extra_tag"),
    ("<think>a</think><answer><b>Rome</b></answer>", "extra_tag"),
    ("<think>a</think><search>b<br/></search>", "extra_tag"),
    ("<think>a</think></information><search>b</search>", "extra_tag"),
    ("<tool>x</tool><think>a</think><search>b</search>", "extra_tag"),
    ("<think>a</think><answer>b</answer><|im_end|></assistant>", "extra_tag"),
]


@pytest.mark.parametrize(("text", "action"), VALID)
def test_a_thought_and_one_block_is_that_search_or_answer(text: str, action: str) -> None:
    assert parse_reply(text, cut=False) == ParsedReply(action)
    assert " ".join(split_action(action)) == action.replace(": ", " ", 1)


@pytest.mark.parametrize(("text", "reason"), INVALID)
def test_any_other_reply_is_no_action_and_says_why(text: str, reason: str) -> None:
    assert parse_reply(text, cut=False) == ParsedReply(None, reason)


def test_the_table_of_bad_replies_has_sixty_entries_and_every_reason_but_the_cut() -> None:
    assert len({text for text, _ in INVALID}) >= 60
    assert {reason for _, reason in INVALID} | {"cut"} == set(FORMAT.reasons)


@pytest.mark.parametrize("text", [text for text, _ in [*VALID, *INVALID]])
def test_a_reply_that_was_cut_is_never_an_action(text: str) -> None:
    assert parse_reply(text, cut=True) == ParsedReply(None, "cut")


PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<search>",
        "</search>",
        "<answer>",
        "</answer>",
        "<information>",
        "a",
        " ",
        "\n",
        "<",
        "b>",
    ]
)


@given(st.lists(PIECES, max_size=12))
def test_whatever_a_policy_says_is_one_act_with_words_or_a_known_reason(pieces: list[str]) -> None:
    parsed = parse_reply("".join(pieces), cut=False)
    if parsed.action is None:
        assert parsed.invalid_reason in FORMAT.reasons
    else:
        act, text = split_action(parsed.action)
        assert act in ("search", "answer") and text == text.strip() != ""


@pytest.mark.parametrize("action", ["", "search", "search:x", "look: up", "answer: "])
def test_an_action_of_another_world_is_refused(action: str) -> None:
    with pytest.raises(ValueError, match="not an action"):
        split_action(action)


def test_every_reason_has_its_own_words() -> None:
    assert len({FORMAT.rejection(reason) for reason in FORMAT.reasons}) == len(FORMAT.reasons)
