"""The search prompts: one skill block and nothing else differs, nothing missing shows, no wanted part lacks."""

from __future__ import annotations

import pytest

from data.environments import Observation, Turn
from data.prompts.search import INVITATION, CompactPrompts, StandardPrompts
from data.tasks import Task

TASK = Task("t", "hotpotqa", "train", "Where was the author of Slow Rain born?", {"answers": ["Tarvold"]})
FIRST = Observation(INVITATION)
FOUND = Observation("<information>\n1. Slow Rain: A novel by Mira Kolben.\n2. Rain: Falls.\n</information>")
HISTORY = [
    Turn(INVITATION, "<think>who?</think><search>Slow Rain</search>", "search: Slow Rain"),
    Turn(FOUND.text, "hm", None),
]
NOW = Observation("The reply could not be read: it has no <think>...</think> block.")
BOTH = pytest.mark.parametrize("prompts", [StandardPrompts(), CompactPrompts()], ids=["standard", "compact"])


def texts(prompts: StandardPrompts | CompactPrompts, skill: str | None) -> list[str]:
    return [
        prompts.opening(TASK, FIRST, skill),
        prompts.window(TASK, [], 0, FIRST, skill),
        prompts.window(TASK, HISTORY, 5, NOW, skill),
    ]


@BOTH
def test_skill_is_one_block_after_the_question_and_nothing_else_differs(prompts) -> None:
    skill = "First search for the work.\nThen search for its author."
    for without, with_skill in zip(texts(prompts, None), texts(prompts, skill), strict=True):
        head, _, tail = without.partition("\n")
        assert TASK.text in head
        assert with_skill.startswith(f"{head}\n") and with_skill.endswith(tail)
        block = with_skill[len(head) + 1 : len(with_skill) - len(tail)]
        assert block.rstrip("\n").endswith(skill) and block.lower().startswith("skill")


@BOTH
@pytest.mark.parametrize("nothing", [None, "", "  \n"])
def test_a_missing_skill_leaves_no_trace(prompts, nothing: str | None) -> None:
    assert texts(prompts, nothing) == texts(prompts, None)
    for text in texts(prompts, nothing):
        assert "skill" not in text.lower() and "None" not in text


@BOTH
def test_the_question_stands_once_and_gold_answers_never(prompts) -> None:
    for text in [*texts(prompts, None), prompts.skill_request(TASK, HISTORY, NOW, True)]:
        assert text.count(TASK.text) == 1 and "Tarvold" not in text


@BOTH
def test_a_window_holds_what_earlier_searches_found_and_names_invalid_replies(prompts) -> None:
    text = prompts.window(TASK, HISTORY, 2, NOW, None)
    assert text.index("search: Slow Rain") < text.index("A novel by Mira Kolben.") < text.index("(invalid reply)")
    assert text.index("(invalid reply)") < text.index(NOW.text)


@BOTH
def test_a_skill_request_names_outcome_and_actions(prompts) -> None:
    success, failure = (prompts.skill_request(TASK, HISTORY, NOW, won) for won in (True, False))
    assert "success" in success and "failure" in failure and success != failure
    assert "search: Slow Rain" in success and "(invalid reply)" in success


def test_standard_prompts_explain_both_forms_and_number_the_turns() -> None:
    prompts = StandardPrompts()
    for text in texts(prompts, None):
        assert all(tag in text for tag in ("<think>", "<search>", "<answer>", "<information>"))
    window = prompts.window(TASK, HISTORY, 5, NOW, None)
    assert "Turns taken so far: 5." in window and "[4] search: Slow Rain" in window and "[5] (invalid" in window
    assert INVITATION not in window
    assert prompts.follow_up(FOUND) == FOUND.text


def test_standard_skill_request_holds_the_passages_and_asks_for_the_two_json_fields() -> None:
    text = StandardPrompts().skill_request(TASK, HISTORY, NOW, False)
    assert "JSON" in text and '"summary"' in text and '"skill"' in text
    assert FOUND.text in text and NOW.text in text


def test_compact_texts_are_exactly_the_few_lines_the_small_policy_learns() -> None:
    prompts = CompactPrompts()
    assert prompts.opening(TASK, FIRST, None) == f"question: {TASK.text}\nsearch or answer"
    assert prompts.opening(TASK, FIRST, "look twice") == f"question: {TASK.text}\nskill: look twice\nsearch or answer"
    assert prompts.follow_up(FOUND) == "- Slow Rain: A novel by Mira Kolben.\n- Rain: Falls."
    assert prompts.follow_up(NOW) == NOW.text
    assert prompts.skill_request(TASK, HISTORY, NOW, False) == (
        f"write a skill\nquestion: {TASK.text}\noutcome: failure\nactions: search: Slow Rain, (invalid reply)"
    )
