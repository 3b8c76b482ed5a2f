"""The fast household driver answers exactly like the stock engine, and its sessions are exact, independent restarts."""

from __future__ import annotations

import json
import lzma
import os
import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from data.environments import Environment, Session, StepResult
from data.household import edition, stock
from data.household.catalog import TASK_TYPES
from data.household.driver import HouseholdSession
from data.household.environment import HouseholdEnvironment
from data.household.generator import generate_task
from data.household.oracle import oracle_plan
from data.household.problem import parse_problem
from data.household.stock import StockSession
from data.tasks import Task
from schemas.errors import ArtifactError, ConfigError, EnvironmentFault

ROOT = Path(__file__).resolve().parent.parent
REAL_GAMES = ROOT.parent / "shared" / "alfworld"
GARBAGE = ["", "LOOK", "go to nowhere 1", "take mug from desk", "look around", "go  to bed 1", "help me"]
PATIENCE = {"reset_timeout_seconds": 3600.0, "step_timeout_seconds": 3600.0}

# Sliced, hot, cold and containing things, two openable receptacles at one spot, one thing in two receptacles, a shut
# lamp: what generated games hold seldom or never.
ODD_GAME = """
(define (problem odd) (:domain alfred) (:objects
  agent1 - agent
  Apple Spare - object   AppleType PlateType KnifeType ButterKnifeType DeskLampType - otype
  SinkBasinType MicrowaveType FridgeType SafeType - rtype
  Apple_bar_1 Apple_bar_2 Plate_bar_1 Knife_bar_1 DeskLamp_bar_1 - object
  Microwave_bar_1 Fridge_bar_1 Safe_bar_1 Sink_bar_1_bar_SinkBasin - receptacle
  loc_bar_0 loc_bar_1 loc_bar_2 loc_bar_3 - location)
 (:init ; the agent starts at the safe
  (atLocation agent1 loc_bar_1) (= (total-cost) 0)
  (receptacleAtLocation Microwave_bar_1 loc_bar_2) (receptacleAtLocation Fridge_bar_1 loc_bar_2)
  (receptacleAtLocation Safe_bar_1 loc_bar_1) (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_bar_3)
  (receptacleType Microwave_bar_1 MicrowaveType) (receptacleType Fridge_bar_1 FridgeType)
  (receptacleType Safe_bar_1 SafeType) (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType)
  (openable Microwave_bar_1) (openable Fridge_bar_1) (openable Safe_bar_1) (opened Fridge_bar_1)
  (objectType Apple_bar_1 AppleType) (objectType Apple_bar_2 AppleType) (objectType Plate_bar_1 PlateType)
  (objectType Knife_bar_1 KnifeType) (objectType DeskLamp_bar_1 DeskLampType)
  (canContain MicrowaveType AppleType) (canContain FridgeType AppleType) (canContain FridgeType KnifeType)
  (canContain SinkBasinType AppleType) (canContain SinkBasinType KnifeType) (canContain SafeType PlateType)
  (inReceptacle Apple_bar_1 Fridge_bar_1) (inReceptacle Apple_bar_1 Sink_bar_1_bar_SinkBasin)
  (inReceptacle Apple_bar_2 Fridge_bar_1) (inReceptacle Plate_bar_1 Fridge_bar_1)
  (inReceptacle Knife_bar_1 Sink_bar_1_bar_SinkBasin) (inReceptacle DeskLamp_bar_1 Safe_bar_1)
  (objectAtLocation Apple_bar_1 loc_bar_2) (objectAtLocation Apple_bar_2 loc_bar_2)
  (objectAtLocation Plate_bar_1 loc_bar_2) (objectAtLocation Knife_bar_1 loc_bar_3)
  (objectAtLocation DeskLamp_bar_1 loc_bar_1)
  (pickupable Apple_bar_1) (pickupable Apple_bar_2) (pickupable Plate_bar_1) (pickupable Knife_bar_1)
  (cleanable Apple_bar_1) (cleanable Apple_bar_2) (cleanable Knife_bar_1) (heatable Apple_bar_1) (heatable Apple_bar_2)
  (coolable Apple_bar_1) (coolable Apple_bar_2) (sliceable Apple_bar_1) (sliceable Apple_bar_2)
  (toggleable DeskLamp_bar_1) (isReceptacleObject Plate_bar_1) (inReceptacleObject Apple_bar_2 Plate_bar_1)
  (isCool Apple_bar_2))
 (:goal %s))
"""
ODD_GOALS = [
    "(and (exists (?o - object) (and (objectType ?o AppleType) (isSliced ?o) (isHot ?o))))",
    "(forall (?o - object) (or (not (coolable ?o)) (isCool ?o)))",
    "(and (isOn DeskLamp_bar_1) (exists (?a ?b - object) (and (not (= ?a ?b)) (isClean ?a) (isCool ?b))))",
]

# Numbers count down along the ids: "apple 2" is Apple_bar_1, "apple 1" is Apple_bar_2 (cool from the start).
ODD_SCRIPT = (
    "look|use desklamp 1|open safe 1|use desklamp 1|use desklamp 1|go to fridge 1|look|take apple 2 from fridge 1|"
    "cool apple 2 with fridge 1|move apple 2 to fridge 1|open microwave 1|take plate 1 from fridge 1|examine plate 1|"
    "inventory|go to safe 1|move plate 1 to safe 1|go to sinkbasin 1|take knife 1 from sinkbasin 1|"
    "clean knife 1 with sinkbasin 1|examine knife 1|go to microwave 1|slice apple 1 with knife 1|"
    "slice apple 2 with knife 1|move knife 1 to fridge 1|take apple 1 from fridge 1|examine apple 1|"
    "heat apple 1 with microwave 1|examine apple 1|move apple 1 to microwave 1|look|close fridge 1|"
    "take apple 1 from microwave 1|cool apple 1 with fridge 1|examine apple 1|help|open fridge 1|"
    "move apple 1 to fridge 1|look|take apple 2 from fridge 1|heat apple 2 with microwave 1|go to sinkbasin 1|"
    "clean apple 2 with sinkbasin 1|examine apple 2|move apple 2 to sinkbasin 1|look|take apple 2 from sinkbasin 1"
)


def odd_task(goal: str = ODD_GOALS[0]) -> Task:
    return Task(f"odd {goal}", "odd", "test", "Bob's list: heat, slice it.", {"pddl_problem": ODD_GAME % goal})


@cache
def generated(task_type: str, size: str = "small") -> Task:
    return generate_task(11, 0, task_type=task_type, size=size, split="train")


def real_tasks(name: str, every: int) -> list[Task]:
    path = REAL_GAMES / f"{name}.jsonl.xz"
    if not path.is_file():
        pytest.skip(f"no {name} games beside the checkout")
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for position, line in enumerate(lines) if position % every == 0]
    keys = ("pddl_problem", "pddl_params", "scene")
    return [Task(r["id"], r["task_type"], r["split"], r["task"], {key: r[key] for key in keys}) for r in rows]


class Pair:
    """One game in both engines; every step is compared."""

    def __init__(self, task: Task) -> None:
        self.fast, self.stock = HouseholdSession(task, "v", **PATIENCE), StockSession(task, "v", **PATIENCE)
        assert self.fast.first_observation == self.stock.first_observation
        assert self.fast.fingerprint == self.stock.fingerprint
        self.commands = self.stock.first_observation.admissible_commands

    def step(self, command: str) -> StepResult:
        ours, theirs = self.fast.step(command), self.stock.step(command)
        assert ours == theirs, command
        assert list(ours.observation.admissible_commands) == sorted(set(ours.observation.admissible_commands))
        self.commands = theirs.observation.admissible_commands
        return theirs

    def random_walk(self, rng: random.Random, steps: int) -> None:
        """Mostly commands that change something, some others, some garbage, some with blanks around."""
        for _ in range(steps):
            hands_on = [c for c in self.commands if c.split()[0] not in ("go", "look", "inventory", "help")]
            pool = hands_on if hands_on and rng.random() < 0.6 else list(self.commands)
            command = rng.choice(GARBAGE if rng.random() < 0.06 else pool)
            self.step(f"  {command}\n" if rng.random() < 0.1 else command)


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_a_generated_game_reads_and_ends_as_in_the_stock_engine(task_type: str) -> None:
    task = generated(task_type)
    pair = Pair(task)
    pair.random_walk(random.Random(task_type), 8)
    results = [pair.step(command) for command in oracle_plan(task, pair.fast.world)]
    assert results[-1].won and results[-1].done
    pair.step("inventory")
    pair.stock.close()


@pytest.mark.parametrize("goal", ODD_GOALS)
def test_rare_states_and_general_goals_agree_with_the_stock_engine(goal: str) -> None:
    pair = Pair(odd_task(goal))
    won = [pair.step(command).won for command in ODD_SCRIPT.split("|")]
    pair.random_walk(random.Random(goal), 5)
    assert len(set(won)) == 2, "the script should pass through won and lost states"
    pair.stock.close()


def test_real_games_read_as_in_the_stock_engine() -> None:
    # The shortest games, of three task types: the stock engine needs seconds for every start of a large one.
    shortest = sorted(real_tasks("valid_seen", every=1), key=lambda task: len(task.payload["pddl_problem"]))
    first_of_type: dict[str, Task] = {}
    for task in shortest:
        first_of_type.setdefault(task.task_type, task)
    for task in list(first_of_type.values())[:3]:
        pair = Pair(task)
        pair.random_walk(random.Random(task.task_id), 12)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "every"), [("valid_seen", 6), ("train_sample", 8)])
def test_many_real_games_read_and_end_as_in_the_stock_engine(name: str, every: int) -> None:
    for task in real_tasks(name, every):
        pair = Pair(task)
        pair.random_walk(random.Random(task.task_id), 60)


def test_a_restart_is_exact_while_other_sessions_play() -> None:
    environment = HouseholdEnvironment()
    tasks = [generated(TASK_TYPES[0]), generated(TASK_TYPES[1]), generated(TASK_TYPES[0], "full")]
    plans = [oracle_plan(task) for task in tasks]

    def alone(task: Task, plan: list[str]) -> list[StepResult]:
        session = environment.start(task)
        return [session.step(command) for command in plan]

    expected = [alone(task, plan) for task, plan in zip(tasks, plans, strict=True)]
    sessions = [environment.start(task) for task in tasks for _ in range(2)]
    played: list[list[StepResult]] = [[] for _ in sessions]
    for turn in range(max(map(len, plans))):
        for index, session in enumerate(sessions):
            if turn < len(plans[index // 2]):
                played[index].append(session.step(plans[index // 2][turn]))
    assert played == [results for results in expected for _ in range(2)]
    for index, session in enumerate(sessions):
        assert environment.start(tasks[index // 2]).fingerprint == session.fingerprint
    assert len({session.fingerprint for session in sessions}) == len(tasks)


def test_a_clone_and_its_original_do_not_touch_each_other() -> None:
    task = generated("pick_and_place_simple")
    original, plan = HouseholdSession(task, "v"), oracle_plan(generated("pick_and_place_simple"))
    for command in plan[:2]:
        original.step(command)
    copy, untouched = original.clone(), original.clone()
    results = [copy.step(command) for command in plan[2:]]
    assert results[-1].won and not original.world.won()
    assert original.step("look") == untouched.step("look")
    assert [original.step(command) for command in plan[2:]] == results
    assert copy.fingerprint == original.fingerprint


@pytest.mark.parametrize("make", [lambda s, c: s.step(c), lambda s, c: s.reject("two_actions")])
def test_what_is_not_admissible_changes_nothing(make) -> None:
    session = HouseholdSession(generated("pick_two_obj_and_place"), "v")
    before = session.step("look")
    for command in [*GARBAGE, "open", "go to", "take"]:
        answer = make(session, command)
        assert answer.observation.text.startswith("Nothing happens.")
        assert answer.observation.admissible_commands == before.observation.admissible_commands
        assert not answer.done
    assert session.step("look") == before


def test_first_observation_holds_banner_and_task_and_no_command_twice() -> None:
    first = HouseholdSession(odd_task(), "v").first_observation
    assert first.text.startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are facing the safe 1.")
    assert first.text.endswith("\n\nYour task is to: Bob's list: heat, slice it..")


def test_fingerprint_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "from tests.test_household_driver import odd_task\n"
        "from data.household.environment import HouseholdEnvironment\n"
        "session = HouseholdEnvironment().start(odd_task())\n"
        "results = [session.step(c) for c in ('open safe 1', 'go to fridge 1', 'take apple 1 from fridge 1', 'look')]\n"
        "print(session.fingerprint, results)\n"
    )
    printed = set()
    for seed in ("1", "77"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True, check=True
        )
        printed.add(done.stdout)
    assert len(printed) == 1 and len(printed.pop()) > 1000


def test_fast_driver_imports_nothing_of_the_engine() -> None:
    code = (
        "import sys\nfrom tests.test_household_driver import odd_task\n"
        "from data.household.environment import HouseholdEnvironment\n"
        "HouseholdEnvironment().start(odd_task()).step('look')\n"
        "heavy = ('alfworld', 'textworld', 'fast_downward', 'torch')\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in heavy))"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_stock_sessions_of_one_game_restart_exactly_and_interleave() -> None:
    environment = HouseholdEnvironment(driver="stock")
    assert isinstance(environment, Environment)
    arguments = sys.argv
    first, second = environment.start(odd_task()), environment.start(odd_task())
    first.step("open safe 1")
    assert (
        second.step("open safe 1").observation.text
        == "You open the safe 1. The safe 1 is open. In it, you see a desklamp 1."
    )
    first.close()
    third = environment.start(odd_task())
    assert third.first_observation == second.first_observation and third.fingerprint == second.fingerprint
    assert sys.argv is arguments
    with pytest.raises(EnvironmentFault, match="closed session"):
        first.step("look")


def test_drivers_have_different_versions_and_so_different_fingerprints() -> None:
    fast, slow = HouseholdEnvironment(), HouseholdEnvironment(driver="stock")
    assert fast.version != slow.version and "alfworld-0.4.2" in fast.version
    sessions: list[Session] = [environment.start(odd_task()) for environment in (fast, slow)]
    assert sessions[0].first_observation == sessions[1].first_observation
    assert sessions[0].fingerprint != sessions[1].fingerprint


def test_another_edition_of_the_engine_is_refused_with_both_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edition, "installed_hashes", lambda: ("a" * 64, edition.GRAMMAR_SHA256))
    with pytest.raises(EnvironmentFault) as caught:
        HouseholdEnvironment().start(odd_task())
    message = str(caught.value)
    assert "a" * 64 in message and edition.DOMAIN_SHA256 in message
    assert "alfworld==0.4.2" in message and 'env.options.driver = "stock"' in message


def test_a_slow_call_is_a_fault_that_names_the_option() -> None:
    with pytest.raises(EnvironmentFault, match="reset_timeout_seconds"):
        HouseholdEnvironment(reset_timeout_seconds=1e-9).start(odd_task())
    session = HouseholdEnvironment(step_timeout_seconds=1e-9).start(odd_task())
    with pytest.raises(EnvironmentFault, match="step_timeout_seconds"):
        session.step("look")


@pytest.mark.parametrize(
    "options",
    [{"driver": "quick"}, {"prompts": "long"}, {"step_timeout_seconds": 0}, {"reset_timeout_seconds": float("nan")}],
)
def test_impossible_options_are_config_errors(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        HouseholdEnvironment(**options)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(:goal", "(:gaol"),
        ("(:init", "(:unit"),
        ("(atLocation agent1 loc_bar_1)", ""),
        ("(atLocation agent1 loc_bar_1)", "(atLocation agent1 loc_bar_1) (atLocation agent1 loc_bar_2)"),
        ("(openable Safe_bar_1)", "(openable Safe_bar_9)"),
        ("(openable Safe_bar_1)", "(lockable Safe_bar_1)"),
        ("(openable Safe_bar_1)", "(openable Apple_bar_1)"),
        ("(openable Safe_bar_1)", "(openable Safe_bar_1"),
        ("(openable Safe_bar_1)", "(receptacleAtLocation Safe_bar_1 loc_bar_2)"),
        ("agent1 - agent", "agent1 - robot"),
        ("Plate_bar_1 Knife_bar_1 DeskLamp", "Plate_bar_1 Plate_bar_1 DeskLamp"),
        ("(isHot ?o)", "(isHot ?z)"),
        ("(isHot ?o)", "(isWarm ?o)"),
        ("the agent starts", "der Agent wählt"),
    ],
)
def test_a_malformed_game_is_an_artifact_error(old: str, new: str) -> None:
    text = ODD_GAME % ODD_GOALS[0]
    assert parse_problem(text).start == "loc_bar_1"
    broken = text.replace(old, new)
    assert broken != text
    if not new.isascii():
        broken = broken.replace(";", "")
    with pytest.raises(ArtifactError):
        parse_problem(broken)


@pytest.mark.parametrize("payload", [{}, {"pddl_problem": None}, {"pddl_problem": " "}, {"pddl_problem": "(("}])
def test_a_task_without_a_usable_game_names_the_task(payload: dict[str, object]) -> None:
    with pytest.raises(ArtifactError, match="task broken/7"):
        HouseholdEnvironment().start(Task("broken/7", "t", "s", "do it", payload))


def test_stock_engine_refuses_a_text_it_would_read_as_grammar() -> None:
    task = Task("odd", "odd", "test", "put #mug# away", {"pddl_problem": ODD_GAME % ODD_GOALS[0]})
    with pytest.raises(EnvironmentFault, match="grammar"):
        stock.load_engine(task)
