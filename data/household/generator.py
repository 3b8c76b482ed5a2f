"""Generated household games: new rooms in the conventions of ALFWorld, so that its own engine plays them.

A game follows from (seed, split, size, task type, index) alone, whatever else is generated, in whatever order. Every
game is proved solvable: the oracle's plan is played to a win before the game is handed out; a draw that cannot be
furnished or won is drawn again with the next attempt's generator.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence

from data.household.catalog import DECOR, LAMP, TASK_TYPES, catalog
from data.household.oracle import proves_solvable
from data.household.room import SIZES, Room, Unfit, draw_room
from data.household.scenes import SPLITS
from data.tasks import Panel, Task
from schemas.errors import ConfigError, EnvironmentFault

VERSION = 1
ATTEMPTS = 100


def generate_task(seed: int, index: int, *, task_type: str, size: str, split: str) -> Task:
    """The game number `index` of one stream.

    The payload holds `pddl_problem`, `pddl_params`, `scene`, `size` and `generator` (version, seed, index).
    Raises ConfigError for an unknown type, size or split and EnvironmentFault when no attempt gives a game.
    """
    _check(task_type, size, split, seed=seed, index=index)
    for attempt in range(ATTEMPTS):
        task = draft_task(seed, index, task_type=task_type, size=size, split=split, attempt=attempt)
        if task is not None and proves_solvable(task):
            return task
    raise EnvironmentFault(
        "no solvable game was found",
        where=f"{size}/{split}/{task_type}, seed {seed}, index {index}",
        expected=f"one in {ATTEMPTS} draws",
        remedy="this is a defect of the generator: please report it",
    )


def draft_task(seed: int, index: int, *, task_type: str, size: str, split: str, attempt: int) -> Task | None:
    """One attempt at a game, not yet proved solvable; None when the draw cannot be furnished."""
    stream = f"household-game/{VERSION}/{split}/{size}/{task_type}/{seed}/{index}/{attempt}"
    rng = random.Random(int.from_bytes(hashlib.sha256(stream.encode()).digest(), "big"))
    try:
        room = draw_room(rng, task_type=task_type, size=size, split=split)
    except Unfit:
        return None
    goal, known = room.goal, catalog()
    words = {"obj": goal.target, "recep": goal.destination, "toggle": goal.lamp, "mrecep": ""}
    text = rng.choice(known.instructions[task_type]).format(**{key: word.lower() for key, word in words.items()})
    payload = {
        "pddl_problem": problem_text(room, name=f"plan_generated_{seed}_{index}"),
        "pddl_params": {
            "object_target": goal.target,
            "parent_target": goal.destination,
            "toggle_target": goal.lamp,
            "mrecep_target": "",
            "object_sliced": False,
        },
        "scene": room.scene.name,
        "size": size,
        "generator": {"version": VERSION, "seed": seed, "index": index},
    }
    return Task(f"generated/{size}/{split}/{task_type}/s{seed}-{index:06d}", task_type, split, text, payload)


def generate_panel(
    name: str, *, seed: int, count: int, size: str, split: str, task_types: Sequence[str] = TASK_TYPES
) -> Panel:
    """`count` games as a panel; see `generate_games`."""
    games = generate_games(seed=seed, count=count, size=size, split=split, task_types=task_types)
    return Panel.of(name, list(games))


def generate_games(
    *, seed: int, count: int, size: str, split: str, task_types: Sequence[str] = TASK_TYPES
) -> Iterator[Task]:
    """`count` games, the types in turn. More games of the same stream begin with those of a shorter call.

    Raises ConfigError before the first game when an argument cannot be.
    """
    if isinstance(count, bool) or count < 1:
        raise ConfigError("a panel needs a task", where="count", expected=">= 1", found=count)
    kinds = tuple(dict.fromkeys(task_types))
    if not kinds:
        raise ConfigError("no task type is named", where="types", expected=f"some of {', '.join(TASK_TYPES)}")
    for kind in kinds:
        _check(kind, size, split, seed=seed)
    places = ((position // len(kinds), kinds[position % len(kinds)]) for position in range(count))
    return (generate_task(seed, index, task_type=kind, size=size, split=split) for index, kind in places)


def problem_text(room: Room, *, name: str) -> str:
    """The PDDL problem of a room, as ALFWorld writes it."""
    lines = [f"(define (problem {name})", "(:domain alfred)", "(:objects", *_declarations(room), ")", "(:init"]
    lines += [*_receptacle_facts(room), *_object_facts(room), f"(atLocation agent1 {room.start})", ")"]
    goal = room.goal
    wanted = catalog().goals[goal.task_type].format(obj=goal.target, recep=goal.destination, toggle=goal.lamp)
    return "\n".join(lines) + wanted.rstrip() + "\n"  # the goal template closes the problem's own bracket


def _declarations(room: Room) -> list[str]:
    # the domain names these types as constants without declaring them: a problem without them does not load
    object_kinds = sorted({thing.kind for thing in room.things} | {"Knife", "ButterKnife"})
    receptacle_kinds = sorted({r.kind for r in room.receptacles} | {"SinkBasin", "Microwave", "Fridge"})
    places = sorted({receptacle.location for receptacle in room.receptacles} | {room.start})
    return [
        "agent1 - agent",
        *(f"{kind}Type - otype" for kind in object_kinds),
        *(f"{kind}Type - rtype" for kind in receptacle_kinds),
        *(f"{thing.identifier} - object" for thing in room.things),
        *(f"{receptacle.identifier} - receptacle" for receptacle in room.receptacles),
        *(f"{place} - location" for place in places),
    ]


def _receptacle_facts(room: Room) -> list[str]:
    known, facts = catalog(), []
    object_kinds = sorted({thing.kind for thing in room.things})
    for receptacle in room.receptacles:
        facts.append(f"(receptacleType {receptacle.identifier} {receptacle.kind}Type)")
        facts.append(f"(receptacleAtLocation {receptacle.identifier} {receptacle.location})")
        if receptacle.kind in known.openable:
            facts.append(f"(openable {receptacle.identifier})")
    for holder in sorted({receptacle.kind for receptacle in room.receptacles}):
        facts += [f"(canContain {holder}Type {kind}Type)" for kind in object_kinds if kind in known.contents[holder]]
    return facts


def _object_facts(room: Room) -> list[str]:
    known, facts = catalog(), []
    for thing in room.things:
        facts.append(f"(objectType {thing.identifier} {thing.kind}Type)")
        facts.append(f"(inReceptacle {thing.identifier} {thing.holder.identifier})")
        facts.append(f"(objectAtLocation {thing.identifier} {thing.holder.location})")
        if thing.kind == LAMP:
            facts.append(f"(toggleable {thing.identifier})")
        elif thing.kind not in DECOR:
            facts.append(f"(pickupable {thing.identifier})")
        if thing.kind in known.containers:
            facts.append(f"(isReceptacleObject {thing.identifier})")
        for capability, kinds in known.capabilities.items():
            if thing.kind in kinds:
                facts.append(f"({capability.lower()} {thing.identifier})")
    return facts


def _check(task_type: str, size: str, split: str, **numbers: int) -> None:
    choices = (("task type", task_type, TASK_TYPES), ("size", size, tuple(SIZES)), ("split", split, SPLITS))
    for what, value, known in choices:
        if value not in known:
            raise ConfigError(f"unknown {what}", where=what, expected=f"one of {', '.join(known)}", found=repr(value))
    for what, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ConfigError(f"impossible {what}", where=what, expected="a whole number >= 0", found=repr(number))
