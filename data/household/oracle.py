"""The oracle: a plan that wins a household game, computed by rules from the hidden state.

It sees every object and so never searches: it proves games solvable and bounds how short an episode can be. Imitating
it teaches guessing (a player cannot know which drawer to open), so demonstrations are not taken from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from data.household.driver import HouseholdSession
from data.household.problem import HouseholdProblem, problem_of
from data.household.world import HouseholdWorld
from data.tasks import Task
from schemas.errors import EnvironmentFault, RsipoError

# task type -> (command word, fact that the action brings about, fact that allows it)
STATE_CHANGES = {
    "pick_clean_then_place_in_recep": ("clean", "isclean", "cleanable"),
    "pick_heat_then_place_in_recep": ("heat", "ishot", "heatable"),
    "pick_cool_then_place_in_recep": ("cool", "iscool", "coolable"),
}


class HiddenState(Protocol):
    """A state of a game that answers for any ground fact."""

    def holds(self, predicate: str, arguments: tuple[str, ...]) -> bool: ...


class NoPlan(EnvironmentFault):
    """The rules find no way to win the game from this state."""


@dataclass
class _View:
    """What the rules read and change while they write the plan. Ids are those of the problem."""

    location: str
    held: str | None
    holder_of: dict[str, str]  # object -> receptacle
    opened: set[str]
    facts: dict[str, set[str]]  # state fact -> objects
    commands: list[str] = field(default_factory=list)


def oracle_plan(task: Task, state: HiddenState | None = None) -> list[str]:
    """The commands that win `task` from `state` (a session's `world`; default: the game's start).

    A game whose goal holds already gets the one command `look`. Raises NoPlan when the rules find no way.
    """
    problem = problem_of(task)
    reader: HiddenState = state if state is not None else HouseholdWorld(problem)
    if problem.goal.reached(reader):
        return ["look"]
    planner = _Planner(task, problem, _view_of(problem, reader))
    return planner.plan()


def proves_solvable(task: Task) -> bool:
    """Whether the oracle's plan wins the game, which is not won at its start."""
    problem = problem_of(task)
    return not problem.goal.reached(HouseholdWorld(problem)) and solvability_fault(task) is None


def solvability_fault(task: Task) -> str | None:
    """Why the oracle's plan, played command by command, does not win the game; None when it does.

    A win before the plan's end counts: official games hold a few objects that lie in two receptacles at once.
    """
    try:
        commands, session = oracle_plan(task), HouseholdSession(task, version="")
    except RsipoError as error:
        return error.sentence()
    admissible = session.first_observation.admissible_commands
    for position, command in enumerate(commands, start=1):
        if command not in admissible:
            return f"command {position} of the plan is not admissible: {command}"
        result = session.step(command)
        if result.won:
            return None
        admissible = result.observation.admissible_commands
    return "the plan ends without a win"


def _view_of(problem: HouseholdProblem, state: HiddenState) -> _View:
    agent = problem.agent
    things = sorted({fact[0] for fact in problem.facts["objecttype"]})
    places = sorted({*problem.receptacles_at, problem.start})
    location = next((place for place in places if state.holds("atlocation", (agent, place))), problem.start)
    held = next((thing for thing in things if state.holds("holds", (agent, thing))), None)
    holder_of = {}
    for thing in things:
        for receptacle in problem.receptacles:
            if state.holds("inreceptacle", (thing, receptacle)):
                holder_of[thing] = receptacle
                break
    opened = {receptacle for receptacle in problem.receptacles if state.holds("opened", (receptacle,))}
    names = ("isclean", "ishot", "iscool")
    facts = {name: {thing for thing in things if state.holds(name, (thing,))} for name in names}
    return _View(location, held, holder_of, opened, facts)


class _Planner:
    """Writes the plan for one game."""

    def __init__(self, task: Task, problem: HouseholdProblem, view: _View) -> None:
        self.task, self.problem, self.view = task, problem, view
        parameters: Any = task.payload.get("pddl_params") or {}
        self.target = f"{parameters.get('object_target', '')}type".lower()
        self.destination = f"{parameters.get('parent_target', '')}type".lower()
        self.lamp = f"{parameters.get('toggle_target', '')}type".lower()

    def plan(self) -> list[str]:
        if self.task.task_type == "look_at_obj_in_light":
            self._look_in_light()
        elif self.task.task_type == "pick_two_obj_and_place":
            self._place_two()
        else:
            self._place_one()
        return self.view.commands

    def _look_in_light(self) -> None:
        lamps = [t for t in self._things(self.lamp, ("toggleable",)) if t in self.view.holder_of]
        if not lamps:
            raise self._no_plan("no lamp stands in a receptacle")
        # a lamp where the object lies saves the walk
        thing = self._nearest(self._things(self.target, ("pickupable",)))
        self._take(thing)
        lamp = min(lamps, key=lambda name: (not self._here(self.view.holder_of[name]), name))
        self._go(self.view.holder_of[lamp])
        self._say(f"use {self._name(lamp)}")

    def _place_one(self) -> None:
        word, wanted, capability = STATE_CHANGES.get(self.task.task_type, ("", "", ""))
        candidates = self._things(self.target, ("pickupable", capability) if capability else ("pickupable",))
        candidates = [t for t in candidates if self._destinations(t)]
        ready = [t for t in candidates if not wanted or t in self.view.facts[wanted]]
        thing = self._nearest(ready or candidates)
        if thing in ready and self.view.holder_of.get(thing) in self._destinations(thing):
            raise self._no_plan("the goal holds for the rules but not for the game")
        self._take(thing)
        if wanted and thing not in ready:
            tool = self._nearest_receptacle(self.problem.tools[word], f"nothing can {word}")
            self._go(tool)
            self._say(f"{word} {self._name(thing)} with {self._name(tool)}")
        self._put(thing, self._nearest_receptacle(self._destinations(thing), "the object fits no destination"))

    def _place_two(self) -> None:
        things = [t for t in self._things(self.target, ("pickupable",)) if self._destinations(t)]
        if not things:
            raise self._no_plan("no object of the wanted class can be taken and put there")

        def there(receptacle: str) -> int:
            return sum(self.view.holder_of.get(thing) == receptacle for thing in things)

        options = sorted(set.intersection(*(set(self._destinations(thing)) for thing in things)))
        if not options:
            raise self._no_plan("no destination takes both objects")
        # the receptacle that already holds most of them; among equals rather one without a door
        goal = min(options, key=lambda name: (-there(name), self._closed(name), name))
        while there(goal) < 2:
            thing = self._nearest([t for t in things if self.view.holder_of.get(t) != goal])
            self._take(thing)
            self._put(thing, goal)

    def _things(self, otype: str, members: Iterable[str]) -> list[str]:
        """Objects of a class that have all the properties, sorted."""
        found = [thing for thing, kind in self.problem.facts["objecttype"] if kind == otype]
        return sorted(thing for thing in found if all(thing in self.problem.members[name] for name in members))

    def _destinations(self, thing: str) -> list[str]:
        """Receptacles of the wanted class that stand somewhere and take the object, sorted."""
        kinds = {receptacle for receptacle, kind in self.problem.facts["receptacletype"] if kind == self.destination}
        accepted = self.problem.accepted_by.get(thing, frozenset())
        return sorted(kinds & accepted & set(self.problem.location_of))

    def _nearest(self, things: Iterable[str]) -> str:
        """The object in hand, else one here, else one that needs no opening; ties by id."""
        reachable = [thing for thing in things if thing == self.view.held or thing in self.view.holder_of]
        if not reachable:
            raise self._no_plan("no object of the wanted class can be reached")

        def cost(thing: str) -> tuple[bool, bool, bool, str]:
            holder = self.view.holder_of.get(thing, "")
            held = thing == self.view.held
            return (not held, not held and not self._here(holder), not held and self._closed(holder), thing)

        return min(reachable, key=cost)

    def _nearest_receptacle(self, receptacles: Iterable[str], lacking: str) -> str:
        standing = [name for name in receptacles if name in self.problem.location_of]
        if not standing:
            raise self._no_plan(lacking)
        return min(standing, key=lambda name: (not self._here(name), self._closed(name), name))

    def _take(self, thing: str) -> None:
        if self.view.held == thing:
            return
        if self.view.held is not None:
            self._drop(self.view.held)
        holder = self.view.holder_of[thing]
        self._go(holder)
        self._open(holder)
        self._say(f"take {self._name(thing)} from {self._name(holder)}")
        self.view.held = thing
        del self.view.holder_of[thing]

    def _drop(self, thing: str) -> None:
        places = self.problem.accepted_by.get(thing, frozenset())
        self._put(thing, self._nearest_receptacle(places, f"nothing takes the {self._name(thing)} in hand"))

    def _put(self, thing: str, receptacle: str) -> None:
        self._go(receptacle)
        self._open(receptacle)
        self._say(f"move {self._name(thing)} to {self._name(receptacle)}")
        self.view.held = None
        self.view.holder_of[thing] = receptacle

    def _go(self, receptacle: str) -> None:
        if not self._here(receptacle):
            self._say(f"go to {self._name(receptacle)}")
            self.view.location = self.problem.location_of[receptacle]

    def _open(self, receptacle: str) -> None:
        if self._closed(receptacle):
            self._say(f"open {self._name(receptacle)}")
            self.view.opened.add(receptacle)

    def _closed(self, receptacle: str) -> bool:
        return receptacle in self.problem.members["openable"] and receptacle not in self.view.opened

    def _here(self, receptacle: str) -> bool:
        return self.problem.location_of.get(receptacle) == self.view.location

    def _name(self, identifier: str) -> str:
        return self.problem.names[identifier]

    def _say(self, command: str) -> None:
        self.view.commands.append(command)

    def _no_plan(self, why: str) -> NoPlan:
        return NoPlan("the oracle finds no plan", where=f"task {self.task.task_id}", found=why)
