"""The documentation's TextWorldExpress module, as it stands on the page: starts, sessions, outcome, errors, a rollout."""

from __future__ import annotations

import importlib
import random
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from data.environments import ClosesResources, Environment, EnvironmentSpec, Session
from data.tasks import Task
from schemas.config_loading import load_config
from schemas.errors import ConfigError, EnvironmentFault, EnvironmentTimeout
from schemas.run_directory import RunDirectory
from schemas.table_io import read_table
from stages import rollout
from stages.episodes import EpisodeJob, Limits, play
from stages.rendering import Renderer
from tests.doc_examples import ScriptedEngine, example

pytest.importorskip("py4j", reason="py4j is not installed")
pytest.importorskip("textworld_express", reason="textworld-express is not installed")
if shutil.which("java") is None:
    pytest.skip("there is no java on the PATH", allow_module_level=True)

SOURCES = {
    "arithmetic": "game=arithmetic,count=2",
    "coin": "game=coin,count=2,numLocations=4,includeDoors=0",
    "cookingworld": "game=cookingworld,count=2,numIngredients=2,numLocations=3",
    "mapreader": "game=mapreader,count=2,numLocations=5,maxDistanceApart=2",
    "peckingorder": "game=peckingorder,count=2",
    "simonsays": "game=simonsays,count=2,gameLength=3",
    "twc": "game=twc,count=2,numLocations=2,numItemsToPutAway=2",
}
STEPS = 25


@pytest.fixture(scope="module")
def module_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with the page's module, importable as `express`."""
    directory = tmp_path_factory.mktemp("express")
    (directory / "express.py").write_text(example("environments.md", "express.py"), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        yield directory


@pytest.fixture(scope="module")
def world(module_directory: Path) -> Iterator[Any]:
    environment = EnvironmentSpec("express:ExpressEnvironment").build()
    yield environment
    environment.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def stock() -> Iterator[Any]:
    """The package's own driver, in a JVM of its own."""
    from textworld_express import TextWorldExpressEnv

    driver = TextWorldExpressEnv(envStepLimit=10**6)
    yield driver
    driver.close()


class Walker:
    """A session and a random walk through it that depends on `seed` and on what the session says alone."""

    def __init__(self, session: Session, seed: int) -> None:
        self.session, self.random, self.done = session, random.Random(seed), False
        self.commands = session.first_observation.admissible_commands
        self.seen: list[object] = [session.fingerprint, session.first_observation]

    def step(self) -> None:
        if not self.done:
            result = self.session.step(self.random.choice([*self.commands, "sing a song"]))
            self.commands, self.done = result.observation.admissible_commands, result.done
            self.seen.append(result)

    def walk(self) -> list[object]:
        for _ in range(STEPS):
            self.step()
        self.session.close()
        return self.seen


def winning_commands(stock: Any, task: Task) -> list[str]:
    payload = task.payload
    stock.reset(payload["seed"], payload["split"], payload["game"], payload["params"], generateGoldPath=True)
    return stock.getGoldActionSequence()


def test_the_module_is_an_environment_that_closes_what_it_holds(world: Any) -> None:
    assert isinstance(world, Environment) and isinstance(world, ClosesResources)
    assert len(example("environments.md", "express.py").splitlines()) <= 160


def test_every_game_that_the_package_has_is_offered_or_known_to_be_left_out(world: Any, stock: Any) -> None:
    games = importlib.import_module("express").GAMES
    assert set(SOURCES) == set(games) == set(stock.getGameNames()) - {"sorting"}


@pytest.mark.parametrize("game", SOURCES)
def test_a_start_is_exact_whatever_was_played_before(world: Any, game: str) -> None:
    [task, other] = world.panel(SOURCES[game])
    walks = []
    for _ in range(2):
        walks.append(Walker(world.start(task), seed=1).walk())
        Walker(world.start(other), seed=2).walk()
    assert walks[0] == walks[1]
    assert Walker(world.start(other), seed=1).seen[0] != walks[0][0]


def test_a_start_is_the_same_in_another_machine(world: Any) -> None:
    another: Any = EnvironmentSpec("express:ExpressEnvironment").build()
    try:
        for source in SOURCES.values():
            task = world.panel(source).tasks[0]
            assert Walker(another.start(task), seed=3).walk() == Walker(world.start(task), seed=3).walk()
    finally:
        another.close()


def test_sessions_of_one_machine_that_are_played_in_turns_do_not_touch_each_other(world: Any) -> None:
    tasks = [task for source in SOURCES.values() for task in world.panel(source)]
    alone = {(task.task_id, seed): Walker(world.start(task), seed).walk() for task in tasks for seed in (1, 2)}
    walkers = {(task.task_id, seed): Walker(world.start(task), seed) for task in tasks for seed in (1, 2)}
    turns, order = list(walkers), random.Random(0)
    for _ in range(STEPS):
        order.shuffle(turns)
        for name in turns:
            walkers[name].step()
    assert {name: walker.seen for name, walker in walkers.items()} == alone


@pytest.mark.parametrize("game", SOURCES)
def test_text_commands_and_outcome_are_those_of_the_package_s_own_driver(world: Any, stock: Any, game: str) -> None:
    for task in world.panel(SOURCES[game]):
        commands = winning_commands(stock, task)
        payload = task.payload
        text, known = stock.reset(payload["seed"], payload["split"], payload["game"], payload["params"])
        session = world.start(task)
        first = session.first_observation
        assert task.text == known["taskDescription"].strip()
        assert (first.text, first.admissible_commands) == (text.strip(), tuple(sorted(known["validActions"])))
        for command in commands:
            text, _, done, known = stock.step(command)
            result = session.step(command)
            assert result.observation.text == text.strip() != ""
            assert result.observation.admissible_commands == tuple(sorted(known["validActions"]))
            assert (result.done, result.won, result.score) == (done, known["tasksuccess"], known["score"])
            if done:
                break
        assert result.won  # the package's commands may go on after that
        session.close()


def test_a_lost_game_ends_and_is_not_won(world: Any) -> None:
    [task, _] = world.panel(SOURCES["simonsays"])
    session = world.start(task)
    said = session.first_observation.text
    wrong = next(command for command in session.first_observation.admissible_commands if command not in said)
    result = session.step(wrong)
    assert result.done and not result.won and result.score < 1


def test_a_refused_command_and_an_unreadable_reply_change_nothing(world: Any) -> None:
    [task, _] = world.panel(SOURCES["coin"])
    session = world.start(task)
    for answer in (session.step("sing a song"), session.reject("no_action"), session.step("")):
        assert answer.observation.admissible_commands == session.first_observation.admissible_commands
        assert answer.observation.text and not answer.done and not answer.won and answer.score == 0
    assert "no <action>" in session.reject("no_action").observation.text
    assert session.step("look around").observation.text == session.first_observation.text


def test_replies_are_read_in_the_format_that_the_prompt_asks_for(world: Any) -> None:
    assert world.parse_reply("<think>so</think><action>take coin</action>", cut=False).action == "take coin"
    assert world.parse_reply("<action>take coin</action>", cut=False).invalid_reason == "no_think"
    assert world.parse_reply("<think>so</think><action>take coin</action>", cut=True).invalid_reason == "cut"


def test_a_panel_is_a_function_of_its_source_and_splits_share_no_game(world: Any) -> None:
    source = "numLocations=4,includeDoors=0,game=coin,seed=1,count=3,split={}"
    train, dev = (world.panel(source.format(split)) for split in ("train", "dev"))
    assert train.sha256 == world.panel("game=coin,includeDoors=0,numLocations=4,seed=1,count=3").sha256 != dev.sha256
    assert [task.payload["seed"] for task in (*train, *dev)] == [1, 2, 3, 10_001, 10_002, 10_003]
    assert {task.payload["params"] for task in train} == {"includeDoors=0,numLocations=4"}
    assert world.panel(source.format("train"), limit=2).tasks == train.tasks[:2]


@pytest.mark.parametrize(
    "source",
    [
        "",
        "coin",
        "game=coin",
        "game=coin,count=0",
        "game=coin,count=many",
        "game=coin,count=-1",
        "game=coin,count=2,seed=999",
        "game=coin,count=2,split=valid",
        "game=coin,game=twc,count=2",
        "game=sorting,count=2",
        "game=coin,count=2,numRooms=3",
        "game=coin,count=2,numLocations=four",
        "game=coin,count=2,numLocations=99",
    ],
)
def test_a_source_that_means_nothing_is_a_configuration_error(world: Any, source: str) -> None:
    with pytest.raises(ConfigError):
        world.panel(source)


def test_closing_ends_the_machine_and_a_dead_one_is_replaced(module_directory: Path) -> None:
    environment: Any = EnvironmentSpec("express:ExpressEnvironment").build()
    [task, _] = environment.panel(SOURCES["simonsays"])
    session = environment.start(task)
    first = environment.machine.gateway.java_process
    first.kill()
    first.wait()
    with pytest.raises(EnvironmentFault):
        session.step("look around")
    session.close()
    assert environment.start(task).fingerprint == session.fingerprint
    second = environment.machine.gateway.java_process
    environment.close()
    assert second.pid != first.pid and second.poll() is not None
    environment.close()
    session.close()


def test_a_call_that_does_not_return_ends_in_a_time_out(module_directory: Path) -> None:
    environment: Any = EnvironmentSpec("express:ExpressEnvironment", {"timeout_seconds": 5.0}).build()
    [task, _] = environment.panel(SOURCES["simonsays"])
    session = environment.start(task)
    session.step("look around")
    machine = environment.machine
    machine.timeout_seconds = 0.3  # only now: a start may take longer on a busy computer
    [connection] = machine.gateway._gateway_client.deque
    connection.socket.settimeout(0.3)
    machine.gateway.java_process.send_signal(signal.SIGSTOP)
    time.sleep(0.2)  # a stop takes effect a little later
    with pytest.raises(EnvironmentTimeout):
        session.step("look around")
    environment.close()


@pytest.mark.parametrize("mode", ["window", "append_only"])
def test_an_episode_is_won_by_the_winning_commands(world: Any, stock: Any, tokenizer: Any, mode: Any) -> None:
    [task, _] = world.panel(SOURCES["simonsays"])
    script = [
        "nothing",
        *(f"<think>Simon says.</think><action>{command}</action>" for command in winning_commands(stock, task)),
    ]
    renderer = Renderer(tokenizer, world.prompts, mode, 3, False)
    records = [
        play(
            ScriptedEngine(tokenizer, renderer, script),  # type: ignore[arg-type]
            world,
            renderer,
            [EpisodeJob(task, 0, 7, skill, skill and "s", "e")],
            limits=Limits(max_turns=9, max_prompt_tokens=4000, max_reply_tokens=64, max_episode_tokens=8000),
            temperature=1.0,
        )[0]
        for skill in (None, "Do what Simon says.")
    ]
    for record in records:
        assert (record.error, record.won, record.stop_reason, record.score) == (None, True, "done", 1.0)
        assert record.invalid_turns == 1
    assert records[0].fingerprint == records[1].fingerprint


def test_the_rollout_stage_plays_it_from_equal_starts_and_leaves_no_machine(
    module_directory: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("express")
    begun: list[Any] = []

    def launch(**options: Any) -> Any:
        answer = launch_gateway(**options)
        begun.append(answer[-1])
        return answer

    launch_gateway = module.launch_gateway
    monkeypatch.setattr(module, "launch_gateway", launch)
    values: Sequence[str] = (
        "env.name=express:ExpressEnvironment",
        "env.options={}",
        "env.max_turns=2",
        "tasks.train=game=simonsays,count=2",
        "tasks.evaluate=game=simonsays,count=2,split=dev",
        "tasks.per_step=2",
        "rollout.group_size=2",
        "prompt.mode=window",
        "prompt.history=1",
        "prompt.max_prompt_tokens=3000",
        "prompt.max_reply_tokens=8",
        "run.threads=1",
        f"model.path={tiny_model_dir}",
    )
    run = RunDirectory.create(tmp_path / "run", load_config("household-tiny", None, list(values)))
    assert rollout.run(run, 1).state == "done"
    rows = read_table(run, "rollouts", 1).to_pylist()
    assert len(rows) == 4 and all(row["error"] is None and row["won"] is False and row["score"] == 0 for row in rows)
    assert {row["stop_reason"] for row in rows} == {"max_turns"}
    assert len({row["task_id"] for row in rows}) == len({(row["task_id"], row["fingerprint"]) for row in rows}) == 2
    assert begun and all(process.poll() is not None for process in begun)
    assert rollout.run(run, 1).state == "up_to_date"
