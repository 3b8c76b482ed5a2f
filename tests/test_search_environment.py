"""The search environment: what episodes see, what decides a start, what is looked up, and which options are refused."""

from __future__ import annotations

import contextlib
import shutil
import time

import pytest

from data.environments import CountsWork, Environment, EnvironmentSpec, PreparesSteps
from data.retrieval.index.shards import staging
from data.search import retrievers
from data.search.environment import SearchEnvironment
from data.search.retrievers import generated_index
from schemas.errors import ArtifactError, ConfigError, LockError
from stages.episodes import Limits, play
from stages.rendering import Renderer
from tests.search_world import WordRetriever, question, search_environment
from tests.test_episodes import ScriptedEngine, job_of

LIMITS = Limits(max_turns=4, max_prompt_tokens=4096, max_reply_tokens=64, max_episode_tokens=8000)


def test_an_episode_searches_and_answers() -> None:
    session = search_environment().start(question())
    assert session.first_observation.text == "Search or answer."
    found = session.step("search: Slow Rain")
    assert (found.done, found.won, found.score) == (False, False, 0.0)
    assert found.observation.text == (
        "<information>\n1. Slow Rain: Slow Rain is a novel by Mira Kolben.\n</information>"
    )
    answered = session.step("answer: the Tarvold.")
    assert (answered.done, answered.won, answered.score) == (True, True, 1.0)
    assert answered.metrics == {"f1": 1.0, "searches": 1.0, "substring_match": 1.0}
    assert answered.observation.text == "The answer is right."


@pytest.mark.parametrize(
    ("answer", "won", "score", "substring"),
    [("in Tarvold", False, 2 / 3, 1.0), ("Elm", False, 0.0, 0.0), ("tarvold!", True, 1.0, 1.0)],
)
def test_exact_match_decides_and_the_finer_scores_are_recorded(answer, won, score, substring) -> None:
    answered = search_environment().start(question()).step(f"answer: {answer}")
    assert answered.done and answered.won is won and answered.score == pytest.approx(score)
    assert answered.metrics["f1"] == answered.score and answered.metrics["substring_match"] == substring


def test_a_passage_cannot_end_the_information_block() -> None:
    text = search_environment().start(question()).step("search: Tarvold town").observation.text
    assert text.count("</information>") == 1 and text.endswith("\n</information>")
    assert "&lt;/information> on the Elm" in text


def test_a_search_that_finds_nothing_says_so_and_topk_and_words_bound_what_is_shown() -> None:
    session = search_environment().start(question())
    assert session.step("search: zzz").observation.text == "<information>\nNo passage was found.\n</information>"
    short = search_environment(topk=1, passage_words=2).start(question())
    assert short.step("search: Mira Kolben").observation.text.count("\n") == 2
    assert ": Mira Kolben\n" in short.step("search: was born").observation.text
    whole = search_environment(passage_words=0).start(question())
    assert "was born in Tarvold." in whole.step("search: born").observation.text


def test_an_unreadable_reply_changes_nothing_and_is_told_why() -> None:
    session = search_environment().start(question())
    refused = session.reject("two_actions")
    assert not refused.done and not refused.won and "more than one <search> or <answer>" in refused.observation.text
    assert session.step("answer: Tarvold").metrics["searches"] == 0.0


def test_a_start_is_the_same_for_the_same_question_index_and_settings_and_no_other() -> None:
    def fingerprint(task=None, **options: object) -> str:
        retriever = WordRetriever(index=str(options.pop("index", "a" * 64)))
        return search_environment(retriever, **options).start(task or question()).fingerprint

    assert len({fingerprint() for _ in range(6)}) == 1
    environment = search_environment()
    first = environment.start(question()).fingerprint
    environment.start(question("other")).step("search: Tarvold")
    assert environment.start(question()).fingerprint == first == fingerprint()
    others = [
        fingerprint(question("other")),
        fingerprint(question(answers=("Tarvold", "Tarvald"))),
        fingerprint(index="b" * 64),
        fingerprint(topk=5),
        fingerprint(passage_words=7),
    ]
    assert len({first, *others}) == 6
    assert fingerprint(prompts="compact") == first  # wording is not state


def test_a_question_of_another_corpus_is_refused() -> None:
    environment = search_environment(corpus="c" * 64)
    environment.start(question(corpus="c" * 64))
    environment.start(question())
    with pytest.raises(ConfigError, match="another corpus"):
        environment.start(question(corpus="d" * 64))
    search_environment(corpus=None).start(question(corpus="d" * 64))  # nothing to compare with


@pytest.mark.parametrize("payload", [{}, {"answers": []}, {"answers": "Tarvold"}, {"answers": [1]}])
def test_a_task_without_gold_answers_is_no_question(payload: dict) -> None:
    task = question()
    object.__setattr__(task, "payload", payload)
    with pytest.raises(ArtifactError, match="no question"):
        search_environment().start(task)


def test_a_round_looks_every_distinct_query_up_once_in_one_call(tokenizer) -> None:
    retriever = WordRetriever()
    environment = search_environment(retriever)
    engine = ScriptedEngine(
        tokenizer,
        [("<think>a</think><search>Slow Rain</search>", "eos"), ("<think>b</think><answer>Tarvold</answer>", "eos")],
    )
    renderer = Renderer(tokenizer, environment.prompts, "append_only", 4, False)
    jobs = [job_of(question("q"), index) for index in range(5)]
    records = play(engine, environment, renderer, jobs, limits=LIMITS, temperature=1.0)
    assert all(record.won and record.stop_reason == "done" for record in records)
    assert retriever.calls == [["Slow Rain"]]
    assert environment.counters() == {"searches": 5.0, "found_nothing": 0.0, "lookups": 1.0}
    assert all(record.metrics["searches"] == 1.0 for record in records)


def test_a_query_that_fails_is_the_fault_of_its_episodes_alone(tokenizer) -> None:
    environment = search_environment(WordRetriever(down=["Slow Rain"]))
    renderer = Renderer(tokenizer, environment.prompts, "append_only", 4, False)
    script = [("<think>a</think><search>Slow Rain</search>", "eos")]
    [down] = play(
        ScriptedEngine(tokenizer, script), environment, renderer, [job_of(question())], limits=LIMITS, temperature=1.0
    )
    assert (down.stop_reason, down.won, down.error) == ("env_error", None, "no line for Slow Rain")
    script = [("<think>a</think><search>Mira Kolben</search>", "eos")]
    [up] = play(
        ScriptedEngine(tokenizer, script), environment, renderer, [job_of(question())], limits=LIMITS, temperature=1.0
    )
    assert (up.stop_reason, up.won, len(up.turns)) == ("max_turns", False, 4)


def test_the_world_is_reached_by_name_and_keeps_the_protocol() -> None:
    built = EnvironmentSpec("search", {"retriever": {"index": "nowhere"}}).build()
    assert isinstance(built, SearchEnvironment) and built.counters() == {}
    built.close()
    environment = search_environment()
    assert isinstance(environment, Environment)
    assert isinstance(environment, PreparesSteps) and isinstance(environment, CountsWork)


def test_closing_lets_go_of_the_retriever() -> None:
    retriever = WordRetriever()
    environment = search_environment(retriever)
    environment.start(question())
    environment.close()
    assert retriever.closed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"a key is missing \(env.options.retriever\)"),
        ({"retriever": {"index": "x"}, "topp": 3}, r"unknown key \(env.options.topp\); did you mean env.options.topk"),
        ({"retriever": {"indx": "x"}}, "did you mean env.options.retriever.index"),
        ({"retriever": {"kind": "bm25"}}, "retriever.index is missing"),
        ({"retriever": {"kind": "bm26", "index": "x"}}, "did you mean bm25"),
        ({"retriever": {"index": "x", "url": "http://h"}}, "belongs to retriever.kind http"),
        ({"retriever": {"index": "x", "retries": 9}}, "belongs to retriever.kind http"),
        ({"retriever": {"index": "x"}, "topk": 0}, r"env.options.topk\): expected >= 1, found 0"),
        ({"retriever": {"index": "x"}, "topk": "3"}, "wrong type .env.options.topk.: expected an integer"),
        ({"retriever": {"index": "x"}, "prompts": "compct"}, "did you mean compact"),
        ({"retriever": "x"}, "env.options.retriever"),
        ({"retriever": {"index": "x"}, "cache": {"max_megabytes": 0}}, "env.options.cache.max_megabytes"),
    ],
)
def test_options_that_cannot_be_are_one_sentence_with_the_key(options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SearchEnvironment(**options)


def test_a_server_without_an_address_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RSIPO_RETRIEVER_URL", raising=False)
    environment = SearchEnvironment(retriever={"kind": "http", "index": "wiki-18"})
    with pytest.raises(ConfigError, match="RSIPO_RETRIEVER_URL"):  # before anything is played
        _ = environment.version
    monkeypatch.setenv("RSIPO_RETRIEVER_URL", "http://127.0.0.1:9")
    assert "wiki-18" in environment.version  # and nobody was asked for it


def test_a_missing_index_is_a_missing_artefact(tmp_path) -> None:
    environment = SearchEnvironment(retriever={"index": str(tmp_path / "nowhere")})
    with pytest.raises(ArtifactError, match="nowhere"):
        _ = environment.version


def test_a_generated_index_that_another_process_makes_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("RSIPO_CACHE", str(tmp_path))
    source = "generated:articles=300,seed=1"
    index = generated_index(source)
    shutil.rmtree(index.path)
    with contextlib.ExitStack() as other:
        other.enter_context(staging(index.path))
        with monkeypatch.context() as patch:
            patch.setattr(retrievers, "BUILD_SECONDS", -1.0)
            with pytest.raises(LockError):
                generated_index(source)
        pauses: list[float] = []
        monkeypatch.setattr(time, "sleep", lambda seconds: (pauses.append(seconds), other.close()))
        assert generated_index(source).index_id == index.index_id
        assert len(pauses) == 1


def test_a_generated_index_that_is_damaged_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("RSIPO_CACHE", str(tmp_path))
    source = "generated:articles=300,seed=1"
    index = generated_index(source)
    before = {path.name: path.read_bytes() for path in index.path.iterdir()}
    (index.path / "passages.bin").write_bytes(b"cut")
    again = generated_index(source)
    assert {path.name: path.read_bytes() for path in again.path.iterdir()} == before
    shutil.rmtree(tmp_path / "indexes")
    (tmp_path / "indexes").write_text("a file in the place of the directory")
    with pytest.raises(ArtifactError):
        generated_index(source)
