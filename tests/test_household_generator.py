"""Generated household games: deterministic, within their size, solvable, and the same game for the stock engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from data.household.catalog import LAMP, STATIONS, TASK_TYPES, catalog
from data.household.driver import HouseholdSession
from data.household.generator import draft_task, generate_panel, generate_task
from data.household.oracle import NoPlan, oracle_plan, solvability_fault
from data.household.problem import problem_of
from data.household.room import SIZES
from data.household.scenes import SCENE_NUMBERS, SPLITS, UNSEEN_SCENES, scene, scene_numbers
from data.tasks import Task
from schemas.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
EVERY = [(size, split, kind) for size in SIZES for split in SPLITS for kind in TASK_TYPES]


def things_and_receptacles(task: Task) -> tuple[int, int]:
    facts = problem_of(task).facts
    return len(facts["objecttype"]), len(facts["receptacletype"])


@pytest.mark.parametrize(("size", "split", "kind"), EVERY)
def test_every_stream_gives_games_that_the_oracle_wins_and_that_are_not_won_at_the_start(
    size: str, split: str, kind: str
) -> None:
    for index in range(4):
        task = generate_task(3, index, task_type=kind, size=size, split=split)
        session = HouseholdSession(task, version="test")
        assert not session.world.won()
        results = [session.step(command) for command in oracle_plan(task)]
        assert [result.won for result in results] == [False] * (len(results) - 1) + [True]
        assert all(result.observation.text != "Nothing happens." for result in results)


@pytest.mark.parametrize("kind", TASK_TYPES)
def test_sizes_stay_within_their_bounds_and_hold_what_the_task_needs(kind: str) -> None:
    for index in range(40):
        task = generate_task(11, index, task_type=kind, size="small", split="train")
        things, receptacles = things_and_receptacles(task)
        assert 5 <= receptacles <= 8 and 6 <= things <= 12
        problem, parameters = problem_of(task), task.payload["pddl_params"]
        kinds = {name for _, name in problem.facts["receptacletype"]}
        needed = {parameters["parent_target"], STATIONS.get(kind, ("",))[0]} - {""}
        assert {f"{name.lower()}type" for name in needed} <= kinds
        copies = sum(name == f"{parameters['object_target'].lower()}type" for _, name in problem.facts["objecttype"])
        assert copies >= (2 if kind == "pick_two_obj_and_place" else 1)
        assert (parameters["toggle_target"] == LAMP) == (kind == "look_at_obj_in_light")


@pytest.mark.parametrize("kind", TASK_TYPES)
def test_full_games_use_the_whole_floor_plan_and_twenty_to_forty_objects(kind: str) -> None:
    for index in range(10):
        task = generate_task(11, index, task_type=kind, size="full", split="train")
        things, receptacles = things_and_receptacles(task)
        assert 20 <= things <= 40
        assert receptacles == len(scene(int(task.payload["scene"].removeprefix("FloorPlan"))).receptacles)


@pytest.mark.parametrize("size", SIZES)
def test_wanted_objects_never_start_in_a_destination_and_the_agent_starts_at_no_receptacle(size: str) -> None:
    for kind in TASK_TYPES:
        for index in range(15):
            task = generate_task(5, index, task_type=kind, size=size, split="valid_seen")
            problem, parameters = problem_of(task), task.payload["pddl_params"]
            kind_of = dict(problem.facts["receptacletype"]) | dict(problem.facts["objecttype"])
            target, goal = (f"{parameters[name].lower()}type" for name in ("object_target", "parent_target"))
            placed = [(kind_of[thing], kind_of[holder]) for thing, holder in problem.facts["inreceptacle"]]
            assert (target, goal) not in placed
            assert problem.start not in problem.receptacles_at
            station = STATIONS.get(kind, (None,))[0]
            assert parameters["parent_target"] != station


def test_objects_lie_only_where_their_class_may_and_every_object_lies_somewhere_once() -> None:
    known = catalog()
    for kind in TASK_TYPES:
        task = generate_task(2, 0, task_type=kind, size="full", split="train")
        problem = problem_of(task)
        kind_of = dict(problem.facts["receptacletype"]) | dict(problem.facts["objecttype"])
        allowed = {
            (f"{thing.lower()}type", f"{holder.lower()}type")
            for thing in {*scene_kinds(task), LAMP}
            for holder in known.holders(thing)
        }
        assert {(kind_of[thing], kind_of[holder]) for thing, holder in problem.facts["inreceptacle"]} <= allowed
        assert set(Counter(thing for thing, _ in problem.facts["inreceptacle"]).values()) == {1}


def scene_kinds(task: Task) -> tuple[str, ...]:
    return scene(int(task.payload["scene"].removeprefix("FloorPlan"))).object_kinds


def test_unseen_split_plays_in_the_four_unseen_scenes_only_and_training_never_does() -> None:
    for split in SPLITS:
        panel = generate_panel("p", seed=1, count=90, size="small", split=split)
        scenes = {int(task.payload["scene"].removeprefix("FloorPlan")) for task in panel}
        assert (scenes <= UNSEEN_SCENES) if split == "valid_unseen" else not scenes & UNSEEN_SCENES
    assert set(scene_numbers("train")) | UNSEEN_SCENES == set(SCENE_NUMBERS)


def test_train_and_validation_games_of_the_same_seed_differ() -> None:
    problems = [
        {re.sub(r"problem \w+", "", t.payload["pddl_problem"]) for t in generate_panel(s, seed=1, count=60, size="small", split=s)}
        for s in ("train", "valid_seen")
    ]  # fmt: skip
    assert len(problems[0]) == len(problems[1]) == 60
    assert not problems[0] & problems[1]


def test_a_game_does_not_depend_on_what_was_generated_before_or_beside_it() -> None:
    alone = generate_task(9, 2, task_type="pick_two_obj_and_place", size="small", split="train")
    long = generate_panel("p", seed=9, count=18, size="small", split="train")
    only = generate_panel("p", seed=9, count=3, size="small", split="train", task_types=["pick_two_obj_and_place"])
    assert alone.sha256 in {task.sha256 for task in long}
    assert alone.sha256 in {task.sha256 for task in only}
    longer = generate_panel("p", seed=9, count=24, size="small", split="train")
    assert {task.sha256 for task in long} < {task.sha256 for task in longer}


def test_games_are_the_same_in_every_process_and_under_every_hash_seed() -> None:
    code = (
        "from data.household.generator import generate_panel as g;"
        "print(g('a',seed=4,count=12,size='small',split='train').sha256, g('b',seed=4,count=6,size='full',split='valid_unseen').sha256)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(found) == 1
    small = generate_panel("other name", seed=4, count=12, size="small", split="train")
    assert found.pop().split()[0] == small.sha256


def test_types_take_turns_and_instructions_vary() -> None:
    panel = generate_panel("p", seed=0, count=120, size="small", split="train")
    assert set(Counter(task.task_type for task in panel).values()) == {20}
    for kind in TASK_TYPES:
        openings = {task.text.split()[0] for task in panel if task.task_type == kind}
        starts = {text.split()[0] for text in catalog().instructions[kind]}
        assert openings == starts
    assert len({task.payload["scene"] for task in panel}) > 40


def test_ids_name_the_stream() -> None:
    task = generate_task(7, 12, task_type="pick_and_place_simple", size="small", split="valid_seen")
    assert task.task_id == "generated/small/valid_seen/pick_and_place_simple/s7-000012"
    assert task.payload["generator"] == {"version": 1, "seed": 7, "index": 12}


def test_almost_every_first_draft_is_accepted() -> None:
    drafts = [
        draft_task(21, index, task_type=kind, size=size, split="train", attempt=0)
        for size in SIZES
        for kind in TASK_TYPES
        for index in range(20)
    ]
    accepted = sum(draft is not None and solvability_fault(draft) is None for draft in drafts)
    assert accepted >= 0.95 * len(drafts)


def test_the_oracle_plans_from_the_middle_of_a_game_too() -> None:
    for kind in TASK_TYPES:
        task = generate_task(6, 1, task_type=kind, size="small", split="train")
        session = HouseholdSession(task, version="test")
        plan = oracle_plan(task)
        for command in plan[: len(plan) // 2]:
            session.step(command)
        rest = oracle_plan(task, session.world)
        assert len(rest) == len(plan) - len(plan) // 2
        assert [session.step(command).won for command in rest][-1]


def test_the_oracle_frees_its_hands_of_a_wrong_object_first() -> None:
    task = generate_task(8, 0, task_type="pick_and_place_simple", size="small", split="train")
    target = task.payload["pddl_params"]["object_target"].lower()
    session = HouseholdSession(task, version="test")
    world = session.world
    for command in [f"go to {world.problem.names[name]}" for name in world.problem.receptacles]:
        session.step(command)
        wrong = [c for c in world.commands() if c.startswith("take ") and not c.startswith(f"take {target} ")]
        if wrong:
            session.step(min(wrong))
            break
    assert world.held
    results = [session.step(command) for command in oracle_plan(task, world)]
    assert results[-1].won


def test_a_game_without_the_wanted_object_has_no_plan_and_is_reported() -> None:
    task = generate_task(8, 0, task_type="pick_and_place_simple", size="small", split="train")
    parameters = {**task.payload["pddl_params"], "object_target": "Unicorn"}
    broken = Task(task.task_id, task.task_type, task.split, task.text, {**task.payload, "pddl_params": parameters})
    with pytest.raises(NoPlan):
        oracle_plan(broken)
    assert "no object of the wanted class" in (solvability_fault(broken) or "")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"task_type": "pick_up"}, "task type"),
        ({"size": "tiny"}, "size"),
        ({"split": "test"}, "split"),
        ({"seed": -1}, "seed"),
        ({"index": True}, "index"),
    ],
)
def test_impossible_streams_are_refused_with_what_was_expected(changes: dict[str, object], part: str) -> None:
    arguments = {"seed": 0, "index": 0, "task_type": TASK_TYPES[0], "size": "small", "split": "train", **changes}
    with pytest.raises(ConfigError, match=part) as caught:
        generate_task(**arguments)  # type: ignore[arg-type]
    assert caught.value.expected


def test_floor_plans_are_complete_and_their_ids_unique() -> None:
    for number in SCENE_NUMBERS:
        plan = scene(number)
        ids = [receptacle.identifier for receptacle in plan.receptacles]
        assert len(set(ids)) == len(ids) >= 5
        if plan.room == "Kitchen":
            assert {"SinkBasin", "Microwave", "Fridge", "StoveBurner", "CoffeeMachine", "GarbageCan"} <= plan.kinds


@pytest.mark.parametrize("kind", ["pick_two_obj_and_place", "look_at_obj_in_light", "pick_heat_then_place_in_recep"])
def test_the_stock_engine_agrees_that_the_oracle_wins(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("textworld")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))  # keeps the engine's cache directory out of the home
    from data.household.stock import StockSession

    task = generate_task(13, 0, task_type=kind, size="small", split="valid_seen")
    fast, stock = HouseholdSession(task, version="test"), StockSession(task, version="test")
    assert stock.first_observation == fast.first_observation
    won = []
    for command in oracle_plan(task):
        ours, theirs = fast.step(command), stock.step(command)
        assert ours.observation == theirs.observation
        won.append(theirs.won)
    stock.close()
    assert won == [False] * (len(won) - 1) + [True]
