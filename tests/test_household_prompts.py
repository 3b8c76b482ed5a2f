"""The household prompts: one skill block and nothing else differs, nothing missing shows, no wanted part lacks."""

from __future__ import annotations

import pytest

from data.environments import Observation, Turn
from data.prompts.household import BANNER, CompactPrompts, StandardPrompts
from data.tasks import Task

TASK = Task("t", "pick_and_place_simple", "train", "put a mug in desk", {})
ROOM = "You are in the middle of a room. Looking quickly around you, you see a bed 1, and a desk 1."
FIRST = Observation(
    f"{BANNER}\n\n{ROOM}\n\nYour task is to: put a mug in desk.", ("go to bed 1", "go to desk 1", "look")
)
NOW = Observation("You arrive at bed 1. On the bed 1, you see a mug 1.", ("look", "take mug 1 from bed 1"))
HISTORY = [Turn(FIRST.text, "<think>b</think><action>go to bed 1</action>", "go to bed 1"), Turn(NOW.text, "hm", None)]
BOTH = pytest.mark.parametrize("prompts", [StandardPrompts(), CompactPrompts()], ids=["standard", "compact"])


def texts(prompts: StandardPrompts | CompactPrompts, skill: str | None) -> list[str]:
    return [
        prompts.opening(TASK, FIRST, skill),
        prompts.window(TASK, [], 0, FIRST, skill),
        prompts.window(TASK, HISTORY, 5, NOW, skill),
    ]


@BOTH
def test_skill_is_one_block_after_the_task_line_and_nothing_else_differs(prompts) -> None:
    skill = "Look on every bed first.\nThen walk to the desk."
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
        assert "skill" not in text.lower() and "None" not in text and "nan" not in text.split()


@BOTH
def test_banner_and_task_are_not_repeated(prompts) -> None:
    for text in [*texts(prompts, None), prompts.skill_request(TASK, HISTORY, NOW, True)]:
        assert BANNER not in text and text.count(TASK.text) == 1


@BOTH
def test_an_invalid_turn_is_named_as_such(prompts) -> None:
    for text in (prompts.window(TASK, HISTORY, 2, NOW, None), prompts.skill_request(TASK, HISTORY, NOW, False)):
        assert "(invalid reply)" in text and "None" not in text


@BOTH
def test_a_skill_request_names_outcome_and_actions(prompts) -> None:
    success, failure = (prompts.skill_request(TASK, HISTORY, NOW, won) for won in (True, False))
    assert "success" in success and "failure" in failure and success != failure
    assert "go to bed 1" in success and TASK.text in success


def test_standard_window_holds_count_history_observation_commands_and_format() -> None:
    text = StandardPrompts().window(TASK, HISTORY, 5, NOW, None)
    assert "Turns taken so far: 5." in text
    assert "[4] Observation: You are in the middle" in text and "[5] Action: (invalid reply)" in text
    assert f"Observation: {NOW.text}\nAdmissible actions: look; take mug 1 from bed 1" in text
    assert "<think>" in text and "<action>" in text


def test_standard_skill_request_asks_for_the_two_json_fields() -> None:
    text = StandardPrompts().skill_request(TASK, HISTORY, NOW, False)
    assert "JSON" in text and '"summary"' in text and '"skill"' in text
    assert f"Last observation: {NOW.text}" in text


def test_standard_prompts_leave_out_an_empty_command_list() -> None:
    assert StandardPrompts().follow_up(Observation("It rains.")) == "Observation: It rains."


def test_compact_texts_are_exactly_the_few_lines_the_small_policy_learns() -> None:
    prompts = CompactPrompts()
    seen = "you see a bed 1, and a desk 1."
    assert prompts.opening(TASK, FIRST, None) == f"task: put a mug in desk\n{seen}"
    assert prompts.opening(TASK, FIRST, "go to bed first") == f"task: put a mug in desk\nskill: go to bed first\n{seen}"
    assert prompts.follow_up(NOW) == NOW.text
    assert prompts.skill_request(TASK, HISTORY, NOW, False) == (
        "write a skill\ntask: put a mug in desk\noutcome: failure\nactions: go to bed 1, (invalid reply)"
    )
