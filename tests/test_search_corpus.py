"""The scripted searcher, its skills, and the corpus that the bundled search policy is trained on."""

from __future__ import annotations

import random

import pytest

from data.environments import Observation
from data.policies import search_corpus as corpus
from data.policies.conversations import Conversation
from data.prompts.search import CompactPrompts
from data.search.demonstrator import MAX_SEARCHES, Searcher, bad_plans, good_plan, plan_steps, reading
from data.search.encyclopaedia import Question
from data.search.environment import SearchEnvironment
from data.search.relations import DATA_SETS
from data.search.replies import parse_reply
from data.search.skill_texts import VAGUE_SKILLS, skill_reply, skill_text, vague_skill
from data.tasks import Task
from stages.skill_writing import parse_skill


@pytest.fixture(scope="module")
def books() -> corpus.Library:
    return corpus.library(7, 0)


def play(books: corpus.Library, question: Question, searches: int) -> tuple[str, int]:
    """(answer, searches made) of the searcher with a plan."""
    player, passages = Searcher(question, searches), []
    for made in range(corpus.MAX_TURNS + 2):
        _, act, text = player.reply([(passage.title, passage.text) for passage in passages])
        if act == "answer":
            return text, made
        passages = books.search(text)
    return "", corpus.MAX_TURNS


def test_the_right_number_of_searches_answers_nearly_every_question(books: corpus.Library) -> None:
    for data_set in DATA_SETS:
        asked = books.questions[data_set][:60]
        played = [play(books, question, good_plan(data_set)) for question in asked]
        right = sum(answer == question.answer for (answer, _), question in zip(played, asked, strict=True))
        assert right >= 57
        assert min(made for _, made in played) == good_plan(data_set)


def test_a_wrong_number_of_searches_answers_none(books: corpus.Library) -> None:
    for data_set in DATA_SETS:
        for searches in bad_plans(data_set):
            for question in books.questions[data_set][:20]:
                assert play(books, question, searches)[0] != question.answer


def test_too_few_searches_answer_with_what_lies_on_the_way(books: corpus.Library) -> None:
    for question in books.questions["gen-works"][:20]:
        assert play(books, question, 1)[0] == question.entities[1]
        assert play(books, question, 0)[0] == question.subject


def test_the_searcher_reads_the_article_of_the_name_and_no_other() -> None:
    passages = [
        ("Mira Osten", "She was born in Old Ashwick."),
        ("Mira Kolber", "He was born in Ashwick and died in Lindale."),
    ]
    assert reading("Mira Kolber", "born in", passages) == "Ashwick"
    assert reading("Mira Kolber", "died in", passages) == "Lindale"
    assert reading("Mira", "born in", passages) is None


def test_skill_texts_parse_as_skills_and_tell_plans_apart() -> None:
    texts = {skill_text(searches, random.Random(0)): searches for searches in range(MAX_SEARCHES + 1)}
    assert len(texts) == MAX_SEARCHES + 1
    assert not set(texts) & {f"{text}." for text in VAGUE_SKILLS}
    for text, searches in texts.items():
        assert parse_skill(skill_reply(text, searches), cut=False, min_words=5).skill == text
    assert parse_skill(skill_reply(vague_skill(random.Random(1)), None), cut=False, min_words=5).skill is not None


def test_an_example_is_a_function_of_seed_and_index() -> None:
    assert [corpus.example(3, index) for index in range(12)] == [corpus.example(3, index) for index in range(12)]
    assert corpus.example(3, 0) != corpus.example(4, 0)


def test_every_world_of_the_corpus_has_other_names() -> None:
    first, second = corpus.library(7, 0), corpus.library(7, 1)
    assert len(set(first.world.entities) & set(second.world.entities)) < corpus.WORLD_ARTICLES / 3
    assert min(first.world.seed, second.world.seed) >= 2**40


def test_examples_alternate_roles_and_every_reply_with_loss_parses() -> None:
    injected = learned = skills = drills = 0
    for index in range(400):
        conversation = corpus.example(7, index)
        assert [m.role for m in conversation] == ["user", "assistant"] * (len(conversation) // 2)
        assert not any(m.loss for m in conversation if m.role == "user")
        if conversation[0].content.startswith("write a skill"):
            skills += 1
            assert parse_skill(conversation[1].content, cut=False, min_words=5).skill is not None
            continue
        if conversation[0].content.endswith("?"):
            drills += 1
            continue
        assert len(conversation) <= 2 * corpus.MAX_TURNS
        for message in conversation[1::2]:
            assert parse_reply(message.content, cut=False).valid, message.content
            learned, injected = learned + message.loss, injected + (not message.loss)
    assert skills > 20 and drills > 40 and injected > 15 and learned > 10 * injected


def test_drills_are_answered_by_their_passages() -> None:
    asked = missing = 0
    for index in range(300):
        conversation = corpus.example(7, index)
        lines = conversation[0].content.splitlines()
        if not lines[0].startswith("- "):
            continue
        articles = {line[2:].partition(": ")[0]: line for line in lines[:-1]}
        for question, answer in zip(conversation[::2], conversation[1::2], strict=True):
            anchor, _, name = question.content.splitlines()[-1].removesuffix("?").partition(": ")
            said = answer.content.removeprefix("<think> ").removesuffix("</think>")
            asked += 1
            if name not in articles:
                missing += 1
                assert said == f"{name} not found"
            else:
                assert said.startswith(f"{name} {anchor} ")
                assert said.removeprefix(f"{name} ") in articles[name]
    assert asked > 200 and missing > 10


def test_unaided_plans_are_right_in_the_stated_share() -> None:
    rng = random.Random(0)
    for data_set in DATA_SETS:
        draws = [corpus.unaided_plan(data_set, rng) == good_plan(data_set) for _ in range(2000)]
        assert abs(sum(draws) / len(draws) - corpus.GOOD_SHARE) < 0.04


def replayed(environment: SearchEnvironment, task: Task, conversation: Conversation, skill: str | None) -> list[str]:
    """The user messages of an episode in which the policy says what the conversation's assistant says."""
    prompts, session = CompactPrompts(), environment.start(task)
    texts = [prompts.opening(task, session.first_observation, skill)]
    for message in conversation[1::2]:
        action = environment.parse_reply(message.content, cut=False).action
        assert action is not None
        result = session.step(action)
        if not result.done:
            texts.append(prompts.follow_up(Observation(result.observation.text)))
    return texts


def test_training_text_is_the_text_of_real_episodes(books: corpus.Library) -> None:
    environment = SearchEnvironment(
        prompts="compact",
        topk=corpus.TOPK,
        passage_words=corpus.PASSAGE_WORDS,
        retriever={"kind": "bm25", "index": f"generated:articles={corpus.WORLD_ARTICLES},seed={books.world.seed}"},
    )
    rng = random.Random(5)
    for number in range(40):
        question = rng.choice(books.questions[DATA_SETS[number % 4]])
        skill = skill_text(2, rng) if number % 2 else None
        conversation, turns, won = corpus._episode(question, number % 3, skill, books, rng)
        task = Task(str(number), question.data_set, "train", question.text, {"answers": [question.answer]})
        assert replayed(environment, task, conversation, skill) == [message.content for message in conversation[::2]]
        assert won == (plan_steps(question, number % 3)[-1] == "answer" and number % 3 == good_plan(question.data_set))
        assert len(turns) == len(conversation) // 2
    environment.close()
