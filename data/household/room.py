"""Draws one furnished room for a goal: which floor plan, which receptacles of it, what lies where.

Pure: everything follows from the random generator that is passed in. Objects go where the wheel says they may, more of
them where official rooms have more; the wanted objects never start where they are to end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from data.household.catalog import ATTRACTION, CAPACITY, DECOR, LAMP, STATIONS, UNLIMITED, catalog
from data.household.scenes import Point, Receptacle, Scene, identifier, location, scene, scene_numbers

Item = TypeVar("Item")


@dataclass(frozen=True)
class Size:
    """Inclusive bounds of a room. `receptacles` is None where the whole floor plan is used."""

    receptacles: tuple[int, int] | None
    objects: tuple[int, int]
    crowding: float  # how much a kind that is there already is avoided when the next object is drawn


SIZES = {"small": Size((5, 8), (6, 12), 3.0), "full": Size(None, (20, 40), 0.5)}
MAX_INSTANCES = 3  # as in the official games


@dataclass(frozen=True)
class Goal:
    """What is wanted: an object class and a receptacle class, or an object class and a lamp."""

    task_type: str
    target: str
    destination: str
    lamp: str

    @property
    def station(self) -> str | None:
        """The receptacle class at which the object is cleaned, heated or cooled first."""
        return STATIONS[self.task_type][0] if self.task_type in STATIONS else None

    @property
    def copies(self) -> int:
        return 2 if self.task_type == "pick_two_obj_and_place" else 1


@dataclass(frozen=True)
class Thing:
    """One object and the receptacle that holds it."""

    identifier: str
    kind: str
    holder: Receptacle


@dataclass(frozen=True)
class Room:
    """A furnished room and the goal it was made for. `start` is a location that reaches no receptacle."""

    scene: Scene
    goal: Goal
    receptacles: tuple[Receptacle, ...]
    things: tuple[Thing, ...]
    start: str


class Unfit(Exception):
    """The draw cannot be furnished (the caller draws again with the next attempt's generator)."""


def draw_room(rng: random.Random, *, task_type: str, size: str, split: str) -> Room:
    """One room for one task type. Raises Unfit when too few objects find a place."""
    bounds = SIZES[size]
    plan = scene(rng.choice(eligible_scenes(task_type, split)))
    goals = scene_goals(plan.number, task_type)
    target = rng.choice(sorted({goal.target for goal in goals}))
    goal = rng.choice([goal for goal in goals if goal.target == target])
    furniture = _Furniture(rng, plan, goal, bounds)
    furniture.place_wanted()
    furniture.fill_receptacles()
    furniture.fill_objects()
    return furniture.room()


@cache
def eligible_scenes(task_type: str, split: str) -> tuple[int, ...]:
    """The floor plans of a split in which a task type has a goal."""
    return tuple(number for number in scene_numbers(split) if scene_goals(number, task_type))


@cache
def scene_goals(number: int, task_type: str) -> tuple[Goal, ...]:
    """Every goal of a type that a floor plan admits: target and destination exist, and they are not the trivial pair."""
    plan, known = scene(number), catalog()
    if plan.room not in known.rooms[task_type]:
        return ()
    takeable = sorted(kind for kind in plan.object_kinds if any(kind in kinds for kinds in known.contents.values()))
    if task_type == "look_at_obj_in_light":
        if LAMP not in plan.object_kinds or not known.holders(LAMP) & plan.kinds:
            return ()
        return tuple(Goal(task_type, kind, "", LAMP) for kind in takeable if known.holders(kind) & plan.kinds)
    station, capability = STATIONS.get(task_type, (None, None))
    if station is not None and station not in plan.kinds:
        return ()
    copies = 2 if task_type == "pick_two_obj_and_place" else 1
    goals = []
    for target in takeable:
        if capability is not None and target not in known.capabilities[capability]:
            continue
        holders = known.holders(target) & plan.kinds
        for destination in sorted(holders - {station}):
            sources = [r for r in plan.receptacles if r.kind in holders - {destination}]
            roomy = CAPACITY.get(destination, UNLIMITED) >= copies
            if roomy and sum(CAPACITY.get(r.kind, UNLIMITED) for r in sources) >= copies:
                goals.append(Goal(task_type, target, destination, ""))
    return tuple(goals)


class _Furniture:
    """The room while it is being drawn."""

    def __init__(self, rng: random.Random, plan: Scene, goal: Goal, bounds: Size) -> None:
        self.rng, self.plan, self.goal, self.bounds = rng, plan, goal, bounds
        self.chosen: set[Receptacle] = set() if bounds.receptacles else set(plan.receptacles)
        self.things: list[Thing] = []
        self.load: Counter[Receptacle] = Counter()
        self.kinds: Counter[str] = Counter()

    def place_wanted(self) -> None:
        """The wanted objects, the lamp, the destination and the station, before anything else."""
        for _ in range(self.goal.copies):
            self._put(self.goal.target, self.plan.receptacles)
        if self.goal.lamp:
            self._put(self.goal.lamp, self.plan.receptacles)
        for kind in (self.goal.destination, self.goal.station):
            if kind and not any(receptacle.kind == kind for receptacle in self.chosen):
                self.chosen.add(self.rng.choice([r for r in self.plan.receptacles if r.kind == kind]))

    def fill_receptacles(self) -> None:
        """`small`: more receptacles of the floor plan, rather of kinds that are not there yet."""
        if self.bounds.receptacles is None:
            return
        low, high = self.bounds.receptacles
        wanted = self.rng.randint(max(low, len(self.chosen)), high)
        while len(self.chosen) < min(wanted, len(self.plan.receptacles)):
            kinds = Counter(receptacle.kind for receptacle in self.chosen)
            rest = [receptacle for receptacle in self.plan.receptacles if receptacle not in self.chosen]
            weights = [1.0 / (1 + kinds[receptacle.kind]) ** 2 for receptacle in rest]
            self.chosen.add(_weighted(self.rng, rest, weights))

    def fill_objects(self) -> None:
        """Everything else that lies about, up to a number drawn within the size's bounds."""
        low, high = self.bounds.objects
        wanted = self.rng.randint(max(low, len(self.things)), high)
        here = [receptacle for receptacle in self.plan.receptacles if receptacle in self.chosen]
        pool = [kind for kind in self.plan.object_kinds if self._holders(kind, here)]
        while len(self.things) < wanted and pool:
            weights = [1.0 / (1 + self.bounds.crowding * self.kinds[kind]) for kind in pool]
            kind = _weighted(self.rng, pool, weights)
            if self.kinds[kind] >= _most(kind) or not self._holders(kind, here):
                pool.remove(kind)
                continue
            self._put(kind, here)
        if len(self.things) < low:
            raise Unfit(f"only {len(self.things)} objects find a place")

    def room(self) -> Room:
        receptacles = tuple(receptacle for receptacle in self.plan.receptacles if receptacle in self.chosen)
        things = tuple(sorted(self.things, key=lambda thing: thing.identifier))
        return Room(self.plan, self.goal, receptacles, things, self._start(receptacles))

    def _holders(self, kind: str, among: Iterable[Receptacle]) -> list[Receptacle]:
        """Receptacles that may and still can take one more object; wanted objects stay away from their destination."""
        allowed = catalog().holders(kind)
        if kind == self.goal.target:
            allowed -= {self.goal.destination}
        return [r for r in among if r.kind in allowed and self.load[r] < CAPACITY.get(r.kind, UNLIMITED)]

    def _put(self, kind: str, among: Iterable[Receptacle]) -> None:
        holders = self._holders(kind, among)
        if not holders:
            raise Unfit(f"nothing can hold another {kind}")
        holder = _weighted(self.rng, holders, [ATTRACTION[receptacle.kind] for receptacle in holders])
        self.things.append(Thing(self._new_identifier(kind, holder.place), kind, holder))
        self.chosen.add(holder)
        self.load[holder] += 1
        self.kinds[kind] += 1

    def _new_identifier(self, kind: str, place: Point) -> str:
        """An id with coordinates near the holder's, used by no other object: the id is the object's identity."""
        used = {thing.identifier for thing in self.things}
        while True:
            x, height, z = place
            near = (x + self.rng.uniform(-0.4, 0.4), height + self.rng.uniform(0, 0.3), z + self.rng.uniform(-0.4, 0.4))
            if (name := identifier(kind, near)) not in used:
                return name

    def _start(self, receptacles: Sequence[Receptacle]) -> str:
        taken = {receptacle.location for receptacle in receptacles}
        x, z = self.rng.randint(-8, 8), self.rng.randint(-8, 8)
        while (start := location(x, z, 0, 30)) in taken:
            x += 1
        return start


def _most(kind: str) -> int:
    return 1 if kind == LAMP or kind in DECOR else MAX_INSTANCES


def _weighted(rng: random.Random, items: Sequence[Item], weights: Sequence[float]) -> Item:
    """One item, drawn in proportion to its weight."""
    draw = rng.random() * sum(weights)
    for item, share in zip(items, weights, strict=True):
        draw -= share
        if draw < 0:
            return item
    return items[-1]
