"""The episode loop: every limit has its stop reason, a world's exception is a row, the batch changes nothing."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pyarrow as pa
import pytest

from data.environments import EnvironmentSpec
from data.seeds import derive_seed
from schemas.errors import ArtifactError, ConfigError, EngineError
from schemas.tables import SCHEMAS
from stages.engines import GenerationResult
from stages.engines.transformers_engine import TransformersEngine
from stages.episodes import EpisodeJob, Limits, episodes_from_tables, play
from stages.rendering import Renderer, turn_prompt_ids
from tests.fake_world import FakePrompts, FakeWorld, fake_task

LIMITS = Limits(max_turns=6, max_prompt_tokens=2048, max_reply_tokens=5, max_episode_tokens=4000)


class ScriptedEngine:
    """Says what it is told, in turn: (text, stop reason)."""

    weights_sha256 = "0" * 64

    def __init__(self, tokenizer, script) -> None:
        self.tokenizer, self.script, self.turns, self.requests = tokenizer, script, {}, []

    def generate(self, requests, on_tokens=None):
        results = []
        for request in requests:
            turn = self.turns[request.session] = self.turns.get(request.session, -1) + 1
            text, stop = self.script[min(turn, len(self.script) - 1)]
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + ([2] if stop == "eos" else [])
            results.append(GenerationResult(ids, [-0.1] * len(ids), stop))
            self.requests.append(request)
        return results

    def end_sessions(self):
        self.turns.clear()


def job_of(task, index=0, skill=None) -> EpisodeJob:
    skill_id = None if skill is None else "s1"
    return EpisodeJob(task, index, derive_seed(5, task.task_id, index), skill, skill_id, f"e-{task.task_id}-{index}")


@pytest.fixture
def renderer(tokenizer) -> Renderer:
    return Renderer(tokenizer, FakePrompts(), "append_only", 2, False)


def played(tokenizer, renderer, script, task=None, limits=LIMITS):
    world, engine = FakeWorld(), ScriptedEngine(tokenizer, script)
    [record] = play(engine, world, renderer, [job_of(task or fake_task("t"))], limits=limits, temperature=1.0)
    return record, engine, world


def test_an_episode_ends_when_the_world_says_so(tokenizer, renderer):
    record, engine, world = played(tokenizer, renderer, [("a", "eos")])
    assert (record.stop_reason, record.won, record.score, record.error) == ("done", True, 0.3, None)
    assert [turn.action for turn in record.turns] == ["a"] * 3 and record.invalid_turns == 0
    assert record.final_observation.text == "you did a (3)"
    assert world.log == ["t closed"]
    assert [request.seed for request in engine.requests] == [turn.seed for turn in record.turns]
    assert record.turns[1].seed == derive_seed(record.job.seed, "turn", 1)


def test_invalid_replies_are_answered_and_counted(tokenizer, renderer):
    record, _, world = played(tokenizer, renderer, [("9", "eos"), ("a", "length"), ("b", "eos")])
    assert [(t.valid, t.action, t.invalid_reason, t.stop_reason) for t in record.turns[:3]] == [
        (False, None, "no_letter", "eos"),
        (False, None, "cut", "length"),  # it holds an action, but who knows what would have followed
        (True, "b", None, "eos"),
    ]
    assert world.log[:2] == ["t rejected no_letter", "t rejected cut"]
    assert record.invalid_turns == 2 and record.turns[1].observation == "not understood: no_letter (1)"


def test_the_turn_limit_ends_an_episode(tokenizer, renderer):
    record, _, _ = played(tokenizer, renderer, [("9", "eos")])
    assert (record.stop_reason, record.won, len(record.turns)) == ("max_turns", False, 6)


def test_an_episode_ends_before_a_reply_could_run_out_of_room(tokenizer, renderer):
    limits = dataclasses.replace(LIMITS, max_episode_tokens=120)
    record, engine, _ = played(tokenizer, renderer, [("9", "eos")], limits=limits)
    assert (record.stop_reason, record.won) == ("context", False) and 0 < len(record.turns) < 6
    assert all(len(request.prompt_ids) + 5 <= 120 for request in engine.requests)
    engine.context_length = 8  # no model could hold even the opening
    [record] = play(engine, FakeWorld(), renderer, [job_of(fake_task("t"))], limits=LIMITS, temperature=1.0)
    assert (record.stop_reason, record.turns, record.won) == ("context", (), False)


def test_a_window_prompt_that_is_too_long_ends_the_episode(tokenizer):
    window = Renderer(tokenizer, FakePrompts(), "window", 4, False)
    limits = dataclasses.replace(LIMITS, max_prompt_tokens=120)
    record, engine, _ = played(tokenizer, window, [("9", "eos")], limits=limits)
    assert record.stop_reason == "context" and 0 < len(record.turns) < 6
    assert all(len(request.prompt_ids) <= 120 and request.session is None for request in engine.requests)


@pytest.mark.parametrize(
    ("payload", "reason", "error"),
    [
        ({"fail_at": 1, "fail": "error"}, "env_error", "RuntimeError: the world broke"),
        ({"fail_at": 1, "fail": "timeout"}, "timeout", "too slow"),
        ({"fail": "start"}, "env_error", "RuntimeError: no such room"),
    ],
)
def test_a_broken_world_is_a_row_and_touches_no_other_episode(tokenizer, renderer, payload, reason, error):
    jobs = [job_of(fake_task("bad", **payload)), job_of(fake_task("good"))]
    bad, good = play(
        ScriptedEngine(tokenizer, [("a", "eos")]), FakeWorld(), renderer, jobs, limits=LIMITS, temperature=1.0
    )
    assert (bad.stop_reason, bad.won, bad.error) == (reason, None, error)
    assert len(bad.turns) == (2 if "fail_at" in payload else 0)
    assert (good.stop_reason, good.won, len(good.turns)) == ("done", True, 3)
    assert (bad.fingerprint is None) == (payload["fail"] == "start")


def test_a_world_that_cannot_read_a_reply_is_a_row(tokenizer, renderer):
    world = FakeWorld()
    world.parse_reply = lambda text, *, cut: 1 // 0
    engine = ScriptedEngine(tokenizer, [("a", "eos")])
    [record] = play(engine, world, renderer, [job_of(fake_task("t"))], limits=LIMITS, temperature=1.0)
    assert (record.stop_reason, record.won, len(record.turns), record.invalid_turns) == ("env_error", None, 1, 1)


def test_sessions_are_closed_when_the_engine_fails(tokenizer, renderer):
    world, engine = FakeWorld(), ScriptedEngine(tokenizer, [])
    engine.generate = lambda requests, on_tokens=None: (_ for _ in ()).throw(EngineError("gone"))
    with pytest.raises(EngineError):
        play(engine, world, renderer, [job_of(fake_task("t"))], limits=LIMITS, temperature=1.0)
    assert world.log == ["t closed"]


def test_replies_with_broken_logprobs_do_not_count_and_many_are_an_error(tokenizer, renderer):
    class Breaking(ScriptedEngine):
        def generate(self, requests, on_tokens=None):
            results = super().generate(requests)
            if len(self.requests) > 900:
                return results
            first = dataclasses.replace(results[0], logprobs=[math.nan] * len(results[0].logprobs))
            return [first, *results[1:]]

    jobs = [job_of(fake_task("t"), index) for index in range(400)]
    records = play(Breaking(tokenizer, [("a", "eos")]), FakeWorld(), renderer, jobs, limits=LIMITS, temperature=1.0)
    assert [record.won for record in records].count(None) == 2
    assert all(math.isfinite(p) for record in records for turn in record.turns for p in turn.behaviour_logprobs)
    with pytest.raises(EngineError, match="not finite"):
        play(Breaking(tokenizer, [("a", "eos")]), FakeWorld(), renderer, jobs[:9], limits=LIMITS, temperature=1.0)


@pytest.mark.parametrize("batch", [None, 8])
def test_one_broken_reply_among_the_first_stops_nothing_when_enough_follow(tokenizer, renderer, batch):
    class BreakingOnce(ScriptedEngine):
        def generate(self, requests, on_tokens=None):
            first = not self.requests
            results = super().generate(requests)
            if first:
                results[0] = dataclasses.replace(results[0], logprobs=[math.nan] * len(results[0].logprobs))
            return results

    jobs, engine = [job_of(fake_task("t"), index) for index in range(64)], BreakingOnce(tokenizer, [("a", "eos")])
    records = play(engine, FakeWorld(), renderer, jobs, limits=LIMITS, temperature=1.0, batch_episodes=batch)
    assert [record.won for record in records] == [None] + [True] * 63


@pytest.mark.parametrize("mode", ["append_only", "window"])
def test_batch_size_changes_no_token_and_no_outcome(module, tokenizer, mode):
    renderer = Renderer(tokenizer, FakePrompts(), mode, 2, False)
    engine = TransformersEngine.from_module(module, tokenizer)
    jobs = [job_of(fake_task(f"t{number}"), index) for number in range(3) for index in range(4)]
    whole = play(engine, FakeWorld(), renderer, jobs, limits=LIMITS, temperature=1.0)
    for size in (1, 7):
        other = play(engine, FakeWorld(), renderer, jobs, limits=LIMITS, temperature=1.0, batch_episodes=size)
        for a, b in zip(whole, other, strict=True):
            assert a.job is b.job and [t.token_ids for t in a.turns] == [t.token_ids for t in b.turns]
            assert (a.won, a.score, a.stop_reason) == (b.won, b.score, b.stop_reason)
            for left, right in zip(a.turns, b.turns, strict=True):
                np.testing.assert_allclose(left.behaviour_logprobs, right.behaviour_logprobs, atol=1e-5)
    assert len({record.turns[0].token_ids for record in whole}) > 6


@pytest.mark.parametrize("mode", ["append_only", "window"])
def test_recorded_prompts_and_logprobs_are_those_of_the_sequence(module, tokenizer, mode):
    renderer = Renderer(tokenizer, FakePrompts(), mode, 2, False)
    engine = TransformersEngine.from_module(module, tokenizer)
    [record] = play(engine, FakeWorld(), renderer, [job_of(fake_task("t"))], limits=LIMITS, temperature=0.7)
    sequence: list[int] = []
    for number, turn in enumerate(record.turns):
        rebuilt = turn_prompt_ids(renderer, record.job.task, record.turns[:number], turn, None)
        assert rebuilt == list(turn.prompt_token_ids)
        assert renderer.decode(turn.token_ids) == turn.text
        sequence = [*(sequence if mode == "append_only" else []), *turn.prompt_token_ids, *turn.token_ids]
        [scores] = engine.score([sequence], 0.7)
        np.testing.assert_allclose(scores[-len(turn.token_ids) :], turn.behaviour_logprobs, atol=1e-4)


def test_records_survive_their_tables(module, tokenizer, renderer):
    engine = TransformersEngine.from_module(module, tokenizer)
    tasks = [fake_task("a"), fake_task("b", fail_at=1, fail="error"), fake_task("c", fail="start")]
    jobs = [job_of(task, skill=skill) for task, skill in zip(tasks, (None, "open it", None), strict=True)]
    records = play(engine, FakeWorld(), renderer, jobs, limits=LIMITS, temperature=0.4)
    turns = [row for record in records for row in record.turn_rows(3)]
    episode_table = pa.Table.from_pylist([r.episode_row(3, "w" * 64) for r in records], schema=SCHEMAS["rollouts"])
    turn_table = pa.Table.from_pylist(turns[::-1], schema=SCHEMAS["rollout_turns"])
    known = {task.task_id: task for task in tasks}
    assert episodes_from_tables(episode_table, turn_table, known, {"s1": "open it"}) == records
    with pytest.raises(ArtifactError, match="incomplete"):
        episodes_from_tables(episode_table, turn_table.slice(1), known)
    with pytest.raises(ArtifactError, match="task"):
        episodes_from_tables(episode_table, turn_table, {**known, "a": fake_task("a", reach=9)})


def test_progress_tells_of_every_episode(tokenizer, renderer):
    told: list[tuple[int, dict]] = []
    reporter = type("R", (), {"advance": lambda self, n, **fields: told.append((n, fields))})()
    jobs = [job_of(fake_task("a", reach=1)), job_of(fake_task("b"))]
    engine = ScriptedEngine(tokenizer, [("a", "eos")])
    play(engine, FakeWorld(), renderer, jobs, limits=LIMITS, temperature=1.0, reporter=reporter)
    assert told == [(1, {"won": 1, "tokens": 2}), (1, {"won": 1, "tokens": 6})]


def test_household_episodes_play_and_replay_from_the_same_start(module, tokenizer):
    pytest.importorskip("textworld")
    try:
        environment = EnvironmentSpec("household", {"prompts": "compact"}).build()
        panel = environment.panel("generated:size=small,split=train,seed=3,count=2")
    except (ImportError, NotImplementedError) as error:
        pytest.skip(f"the household environment is not complete: {error}")
    renderer = Renderer(tokenizer, environment.prompts, "append_only", 2, False)
    engine = TransformersEngine.from_module(module, tokenizer)
    jobs = [job_of(task, index) for task in panel for index in range(2)]
    limits = dataclasses.replace(LIMITS, max_turns=2)
    records = play(engine, environment, renderer, jobs, limits=limits, temperature=1.0)
    again = play(engine, environment, renderer, jobs[::-1], limits=limits, temperature=1.0)[::-1]
    for a, b in zip(records, again, strict=True):
        assert a.fingerprint == b.fingerprint and [t.token_ids for t in a.turns] == [t.token_ids for t in b.turns]
    assert records[0].fingerprint == records[1].fingerprint != records[2].fingerprint
    assert all(record.stop_reason == "max_turns" and record.won is False for record in records)


class PreparingWorld(FakeWorld):
    """A world that is told of the steps to come, and can fail at it."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.rounds = error, []

    def prepare(self, steps) -> None:
        self.rounds.append([(session.task.task_id, action, session.count) for session, action in steps])
        if self.error is not None:
            raise self.error


def test_a_world_that_prepares_sees_every_step_to_come_of_a_round_before_the_first_is_taken(tokenizer, renderer):
    world, engine = PreparingWorld(), ScriptedEngine(tokenizer, [("a", "eos"), ("?", "eos"), ("b", "eos")])
    jobs = [job_of(fake_task("t", reach=2)), job_of(fake_task("u", reach=2))]
    records = play(engine, world, renderer, jobs, limits=LIMITS, temperature=1.0)
    assert all(record.won for record in records)
    assert world.rounds == [[("t", "a", 0), ("u", "a", 0)], [], [("t", "b", 1), ("u", "b", 1)]]


def test_a_fault_while_preparing_is_the_fault_of_every_episode_of_the_round(tokenizer, renderer):
    world, engine = PreparingWorld(RuntimeError("no line")), ScriptedEngine(tokenizer, [("a", "eos")])
    jobs = [job_of(fake_task("t")), job_of(fake_task("u"))]
    records = play(engine, world, renderer, jobs, limits=LIMITS, temperature=1.0)
    assert [(record.stop_reason, record.won, record.error) for record in records] == [
        ("env_error", None, "RuntimeError: no line")
    ] * 2
    assert all(len(record.turns) == 1 for record in records)


class MeasuredWorld(FakeWorld):
    """Every answer carries a metric."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def start(self, task):
        session = super().start(task)
        answer = session._answer
        session._answer = lambda text: dataclasses.replace(answer(text), metrics={"speed": self.value})
        return session


def test_metrics_and_labels_of_an_episode_come_back_from_its_row(tokenizer, renderer):
    task = dataclasses.replace(fake_task("t"), labels={"hops": "2"})
    engine = ScriptedEngine(tokenizer, [("a", "eos")])
    [record] = play(engine, MeasuredWorld(0.25), renderer, [job_of(task)], limits=LIMITS, temperature=1.0)
    row = record.episode_row(1, "0" * 64)
    assert record.metrics == {"speed": 0.25}
    assert (row["metrics"], row["labels"]) == ([("speed", 0.25)], [("hops", "2")])
    rows = pa.Table.from_pylist([row], SCHEMAS["rollouts"])
    turns = pa.Table.from_pylist(record.turn_rows(1), SCHEMAS["rollout_turns"])
    assert episodes_from_tables(rows, turns, {"t": task})[0].metrics == {"speed": 0.25}
    assert task.sha256 == fake_task("t").sha256


def test_a_metric_that_is_no_number_is_a_fault_of_the_world(tokenizer, renderer):
    engine = ScriptedEngine(tokenizer, [("a", "eos")])
    [record] = play(engine, MeasuredWorld(math.nan), renderer, [job_of(fake_task("t"))], limits=LIMITS, temperature=1.0)
    assert record.stop_reason == "env_error" and "speed" in record.error


class MisconfiguredWorld(FakeWorld):
    """A world whose configuration is found to be wrong only when it starts."""

    def start(self, task):
        raise ConfigError("no such level", where="env.options.level")


def test_a_configuration_error_of_the_world_ends_the_stage_and_is_no_episode(tokenizer, renderer):
    engine = ScriptedEngine(tokenizer, [("a", "eos")])
    with pytest.raises(ConfigError, match="no such level"):
        play(engine, MisconfiguredWorld(), renderer, [job_of(fake_task("t"))], limits=LIMITS, temperature=1.0)
