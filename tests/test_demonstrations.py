"""The scripted player, its skills, and the corpus the bundled policy is trained on."""

from __future__ import annotations

import random
import re

import pytest

from data.household.catalog import TASK_TYPES
from data.household.demonstrator import GOOD_PLANS, Demonstrator, Plan, bad_plans
from data.household.driver import HouseholdSession
from data.household.generator import generate_task
from data.household.replies import parse_reply
from data.household.skill_texts import skill_reply, skill_text, vague_skill
from data.policies import household_corpus as corpus
from data.tasks import Task
from stages.skill_writing import parse_skill


def play(task: Task, plan: Plan, turns: int = 30) -> tuple[bool, list[str], list[str]]:
    """(won, actions, answers) of the player with `plan`."""
    session, params = HouseholdSession(task, "test"), task.payload["pddl_params"]
    player = Demonstrator(params["object_target"].lower(), params["parent_target"].lower(), plan)
    observation, actions, answers = session.first_observation.text, [], []
    for _ in range(turns):
        _, action = player.reply(observation)
        result = session.step(action)
        actions.append(action)
        answers.append(result.observation.text)
        if result.won:
            return True, actions, answers
        observation = result.observation.text
    return False, actions, answers


@pytest.fixture(scope="module")
def games() -> list[Task]:
    return [
        generate_task(11, index, task_type=TASK_TYPES[index % 6], size="small", split="train") for index in range(60)
    ]


def test_a_right_plan_wins_nearly_every_game_without_a_refused_command(games: list[Task]) -> None:
    results = [play(task, GOOD_PLANS[task.task_type]) for task in games]
    assert sum(won for won, _, _ in results) >= 57
    assert not any(answer == "Nothing happens." for won, _, answers in results if won for answer in answers)


def test_a_wrong_plan_never_wins_except_where_the_object_lies_beside_the_lamp(games: list[Task]) -> None:
    for task in games:
        for plan in bad_plans(task.task_type):
            won, actions, _ = play(task, plan)
            if won:
                assert plan == ("use", "take")
                assert not actions[-2].startswith("go to ") and actions[-1].startswith("take ")


def test_the_player_reads_text_only_and_is_deterministic(games: list[Task]) -> None:
    for task in games[:6]:
        assert play(task, GOOD_PLANS[task.task_type]) == play(task, GOOD_PLANS[task.task_type])


def test_skill_texts_parse_as_skills_and_tell_plans_apart() -> None:
    plans = sorted({*GOOD_PLANS.values(), *(plan for kind in TASK_TYPES for plan in bad_plans(kind, ("heat",)))})
    texts = {plan: skill_text(plan, random.Random(0)) for plan in plans}
    assert len(set(texts.values())) == len(plans)
    for plan, text in texts.items():
        assert parse_skill(skill_reply(text, plan), cut=False, min_words=5).skill == text
    assert parse_skill(skill_reply(vague_skill(random.Random(1)), None), cut=False, min_words=5).skill is not None


def test_an_example_is_a_function_of_seed_and_index() -> None:
    assert [corpus.example(3, index) for index in range(12)] == [corpus.example(3, index) for index in range(12)]
    assert corpus.example(3, 0) != corpus.example(4, 0)


def test_examples_alternate_roles_and_every_reply_with_loss_parses() -> None:
    injected = learned = skills = drills = 0
    for index in range(150):
        conversation = corpus.example(5, index)
        assert [m.role for m in conversation] == ["user", "assistant"] * (len(conversation) // 2)
        assert not any(m.loss for m in conversation if m.role == "user")
        if conversation[0].content.startswith("write a skill"):
            skills += 1
            assert parse_skill(conversation[1].content, cut=False, min_words=5).skill is not None
            continue
        if conversation[0].content.endswith("?"):
            drills += 1
            continue
        for message in conversation[1::2]:
            assert parse_reply(message.content, cut=False).valid, message.content
            learned, injected = learned + message.loss, injected + (not message.loss)
    assert skills > 5 and drills > 10 and injected > 10 and learned > 20 * injected / 10


def test_drills_ask_what_the_text_answers_after_renaming_too() -> None:
    asked = 0
    for index in range(200):
        conversation = corpus.example(6, index)
        text = conversation[0].content
        if not text.endswith("?"):
            continue
        for question, answer in zip(conversation[::2], conversation[1::2], strict=True):
            thing = re.fullmatch(r"the ([a-z]+)\?", question.content.splitlines()[-1])
            if thing:
                seen = re.search(rf"\ba {thing[1]} (\d+)", text)
                expected = f"the {thing[1]} {seen[1]}: take" if seen else f"the {thing[1]}: find"
                assert answer.content == f"<think>{expected}</think>"
                asked += 1
    assert asked > 50


def test_renaming_keeps_tools_and_every_name_consistent() -> None:
    rng = random.Random(2)
    task = generate_task(1, 2, task_type="pick_clean_then_place_in_recep", size="small", split="train")
    conversation, *_ = corpus._episode(task, GOOD_PLANS[task.task_type], None, random.Random(0))
    renamed = corpus._renamed(conversation, rng)
    pairs = [
        (old, new)
        for before, after in zip(conversation, renamed, strict=True)
        for old, new in zip(corpus._ENTITY.findall(before.content), corpus._ENTITY.findall(after.content), strict=True)
    ]
    mapping = dict(pairs)
    assert all(mapping[old] == new for old, new in pairs)
    assert len(set(mapping.values())) == len(mapping)
    assert all(new[0] == old[0] for old, new in pairs if old[0] in corpus.KEPT_NAMES)


def test_unaided_plans_are_right_in_the_stated_share(games: list[Task]) -> None:
    rng = random.Random(0)
    draws = [corpus.unaided_plan(games[0], rng) == GOOD_PLANS[games[0].task_type] for _ in range(2000)]
    assert abs(sum(draws) / len(draws) - corpus.GOOD_SHARE) < 0.04
