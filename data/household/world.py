"""The moving parts of one household game: state, what can be done now, what an action changes, whether the goal holds.

Mirrors the engine's domain file action by action (see `Action`). Quirks kept on purpose:
- walking to where one stands already is not offered: the engine drops actions without effect;
- only a held thing can be examined: a stray comma in the domain file disables the other case;
- a tool and a lamp work while they are closed or inside something closed; a lamp once used stays `istoggled`;
- a thing may be in two receptacles at once (some official games start like that);
- `left` remembers from where something was taken: the engine's grammar lists such a thing as "next to" that
receptacle when
  it is put down elsewhere at the same spot.
"""

from __future__ import annotations

from typing import NamedTuple

from data.household.goal import DYNAMIC
from data.household.problem import HouseholdProblem

# Unary facts kept as plain sets of ids.
_MARKS = ("isclean", "ishot", "iscool", "ison", "istoggled", "issliced", "checked")


class Action(NamedTuple):
    """One possible move: its kind and the ids it is about.

    Kinds: goto(receptacle), open(receptacle), close(receptacle), take(object, receptacle), put(object, receptacle),
    clean / heat / cool(object, receptacle), use(object), slice(object, blade), examine_receptacle(receptacle),
    examine_object(object), look, inventory, help.
    """

    kind: str
    first: str = ""
    second: str = ""


class HouseholdWorld:
    """The state of one live game. All ids are those of `problem`; display names are `problem.names`."""

    __slots__ = (
        "_commands",
        "contents",
        "hands_full",
        "held",
        "left",
        "location",
        "marks",
        "object_locations",
        "opened",
        "problem",
    )

    def __init__(self, problem: HouseholdProblem) -> None:
        self.problem = problem
        self.location: str = problem.start
        self.opened: set[str] = set(problem.members["opened"])
        self.contents: dict[str, set[str]] = {receptacle: set() for receptacle in problem.receptacles}
        for thing, receptacle in problem.facts["inreceptacle"]:
            self.contents.setdefault(receptacle, set()).add(thing)
        self.object_locations: set[tuple[str, str]] = {
            (thing, location) for thing, location in problem.facts["objectatlocation"]
        }
        self.left: set[tuple[str, str]] = set()
        self.held: set[str] = {thing for _, thing in problem.facts["holds"]}
        self.hands_full: bool = bool(problem.facts["holdsany"])
        self.marks: dict[str, set[str]] = {name: set(problem.members[name]) for name in _MARKS}
        self._commands: dict[str, Action] | None = None

    def clone(self) -> HouseholdWorld:
        """An independent copy of the state; the problem is shared, it never changes."""
        copy = object.__new__(HouseholdWorld)
        copy.problem, copy.location, copy.hands_full = self.problem, self.location, self.hands_full
        copy.opened, copy.held, copy.left = set(self.opened), set(self.held), set(self.left)
        copy.object_locations = set(self.object_locations)
        copy.contents = {receptacle: set(things) for receptacle, things in self.contents.items()}
        copy.marks = {name: set(things) for name, things in self.marks.items()}
        copy._commands = self._commands
        return copy

    # What is where

    def receptacles_here(self) -> tuple[str, ...]:
        """The receptacles that can be reached from where the agent stands, sorted by id."""
        return self.problem.receptacles_at.get(self.location, ())

    def is_shut(self, receptacle: str) -> bool:
        """Whether the receptacle can be opened and is not."""
        return receptacle in self.problem.members["openable"] and receptacle not in self.opened

    def things_in(self, receptacle: str) -> list[str]:
        """What is in or on a receptacle, sorted by id, whether it can be seen or not."""
        return sorted(self.contents[receptacle])

    def things_beside(self) -> list[str]:
        """What the engine lists as next to the receptacles here, once for each receptacle it was taken from."""
        here = self.receptacles_here()
        things = sorted({thing for thing, _ in self.left if (thing, self.location) in self.object_locations})
        return [thing for thing in things for receptacle in here if (thing, receptacle) in self.left]

    # What can be done

    def commands(self) -> dict[str, Action]:
        """Every admissible command with its action. Not sorted; do not change it."""
        if self._commands is None:
            self._commands = self._find_commands()
        return self._commands

    def _find_commands(self) -> dict[str, Action]:
        problem, names = self.problem, self.problem.names
        found = {"look": Action("look"), "inventory": Action("inventory"), "help": Action("help")}
        here = self.receptacles_here()
        for receptacle, command in problem.goto_commands.items():
            if receptacle not in here:
                found[command] = Action("goto", receptacle)
        for receptacle in here:
            name = names[receptacle]
            found[f"examine {name}"] = Action("examine_receptacle", receptacle)
            if receptacle in problem.members["openable"]:
                kind = "close" if receptacle in self.opened else "open"
                found[f"{kind} {name}"] = Action(kind, receptacle)
            self._add_contents(found, receptacle, name)
        for thing in self.held:
            found[f"examine {names[thing]}"] = Action("examine_object", thing)
            self._add_uses_of(found, thing, here)
        return found

    def _add_contents(self, found: dict[str, Action], receptacle: str, name: str) -> None:
        members, names = self.problem.members, self.problem.names
        shut = self.is_shut(receptacle)
        for thing in self.contents[receptacle]:
            if thing in members["toggleable"]:
                found[f"use {names[thing]}"] = Action("use", thing)
            if not shut and not self.hands_full and thing in members["pickupable"]:
                found[f"take {names[thing]} from {name}"] = Action("take", thing, receptacle)

    def _add_uses_of(self, found: dict[str, Action], thing: str, here: tuple[str, ...]) -> None:
        problem, names = self.problem, self.problem.names
        accepting = problem.accepted_by.get(thing, frozenset())
        for receptacle in here:
            if receptacle in accepting and not self.is_shut(receptacle):
                found[f"move {names[thing]} to {names[receptacle]}"] = Action("put", thing, receptacle)
            for kind, able in (("clean", "cleanable"), ("heat", "heatable"), ("cool", "coolable")):
                if receptacle in problem.tools[kind] and thing in problem.members[able]:
                    found[f"{kind} {names[thing]} with {names[receptacle]}"] = Action(kind, thing, receptacle)
        if thing in problem.blades:
            for target, location in self.object_locations:
                if location == self.location and target in problem.members["sliceable"]:
                    found[f"slice {names[target]} with {names[thing]}"] = Action("slice", target, thing)

    # What an action changes

    def apply(self, action: Action) -> None:
        """Carry out one of `commands()`' actions."""
        self._commands = None
        kind, first, second = action
        if kind == "goto":
            self.location = self.problem.location_of[first]
        elif kind == "open":
            self.opened.add(first)
            self.marks["checked"].add(first)
        elif kind == "close":
            self.opened.discard(first)
        elif kind == "take":
            self.contents[second].discard(first)
            self.left.add((first, second))
            self.object_locations.discard((first, self.location))
            self.held.add(first)
            self.hands_full = True
        elif kind == "put":
            self.contents[second].add(first)
            self.left.discard((first, second))
            self.object_locations.add((first, self.location))
            self.held.discard(first)
            self.hands_full = False
        else:
            self._mark(kind, first)

    def _mark(self, kind: str, first: str) -> None:
        marks = self.marks
        if kind == "clean":
            marks["isclean"].add(first)
        elif kind == "heat":
            marks["ishot"].add(first)
            marks["iscool"].discard(first)
        elif kind == "cool":
            marks["iscool"].add(first)
            marks["ishot"].discard(first)
        elif kind == "use":
            marks["ison"] ^= {first}
            marks["istoggled"].add(first)
        elif kind == "slice":
            marks["issliced"].add(first)
        elif kind == "look":
            marks["checked"].add(self.location)
        elif kind in ("inventory", "help"):
            marks["checked"].add(self.problem.agent)
        else:
            marks["checked"].add(first)

    # Whether something holds

    def holds(self, predicate: str, arguments: tuple[str, ...]) -> bool:
        """Whether a ground fact holds now (predicates in lower case, as in the problem)."""
        if predicate not in DYNAMIC:
            return arguments in self.problem.facts[predicate]
        if predicate == "inreceptacle":
            return arguments[0] in self.contents.get(arguments[1], ())
        if predicate in self.marks:
            return arguments[0] in self.marks[predicate]
        if predicate == "opened":
            return arguments[0] in self.opened
        if predicate == "objectatlocation":
            return arguments in self.object_locations
        if arguments[0] != self.problem.agent:
            return False
        if predicate == "atlocation":
            return arguments[1] == self.location
        return arguments[1] in self.held if predicate == "holds" else self.hands_full

    def won(self) -> bool:
        """Whether the game's goal holds now."""
        return self.problem.goal.reached(self)
