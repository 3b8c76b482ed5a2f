"""One household game as data: the text of a PDDL problem read once into an immutable `HouseholdProblem`.

The reader keeps what the engine's own translator keeps: everything is lower case, comments and repeated facts do not
count, `(not ...)` and `(= ...)` entries of the initial state are ignored. Display names ("cabinet 3") are numbered
the way the engine's wrapper numbers them: ids sorted, the first of a class gets the highest number. Games outside of
what the driver reproduces exactly (two agents, a receptacle at two places, ...) are refused here, not played
differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from data.household.goal import Formula, Goal, parse_formula
from data.tasks import Task
from schemas.errors import ArtifactError

Fact = tuple[str, ...]

# Every predicate of the domain with the types of its arguments ("object" is the root type there, but the games use it
# for things that can be taken, seen or used; a receptacle standing in its place would change the engine's listing
# order).
PREDICATES: dict[str, tuple[str | None, ...]] = {
    "atlocation": ("agent", "location"),
    "receptacleatlocation": ("receptacle", "location"),
    "objectatlocation": ("object", "location"),
    "openable": ("receptacle",),
    "opened": ("receptacle",),
    "inreceptacle": ("object", "receptacle"),
    "isreceptacleobject": ("object",),
    "inreceptacleobject": ("object", "object"),
    "isreceptacleobjectfull": ("object",),
    "wasinreceptacle": ("object", "receptacle"),
    "checked": (None,),
    "examined": ("location",),
    "receptacletype": ("receptacle", "rtype"),
    "cancontain": ("rtype", "otype"),
    "objecttype": ("object", "otype"),
    "holds": ("agent", "object"),
    "holdsany": ("agent",),
    "holdsanyreceptacleobject": ("agent",),
    "full": ("receptacle",),
    "isclean": ("object",),
    "cleanable": ("object",),
    "ishot": ("object",),
    "heatable": ("object",),
    "iscool": ("object",),
    "coolable": ("object",),
    "pickupable": ("object",),
    "moveable": ("object",),
    "toggleable": ("object",),
    "ison": ("object",),
    "istoggled": ("object",),
    "sliceable": ("object",),
    "issliced": ("object",),
}
TYPES = frozenset({"agent", "location", "receptacle", "object", "rtype", "otype"})


@dataclass(frozen=True)
class HouseholdProblem:
    """A game before its first move. Ids are the lower-case PDDL names; all listings are sorted by id.

    `types` maps every declared id to its type, `facts` every predicate to its initial argument tuples, `names` every id
    that occurs in a fact to its display name.
    """

    types: Mapping[str, str] = field(repr=False)
    facts: Mapping[str, frozenset[Fact]] = field(repr=False)
    names: Mapping[str, str] = field(repr=False)
    goal_formula: Formula = field(repr=False)
    agent: str
    start: str

    @cached_property
    def goal(self) -> Goal:
        """The goal, prepared for evaluation after every step."""
        return Goal(self.goal_formula, self.types, self.facts)

    @cached_property
    def location_of(self) -> dict[str, str]:
        """Receptacle id to the one location from which it is reached."""
        return {fact[0]: fact[1] for fact in sorted(self.facts["receptacleatlocation"])}

    @cached_property
    def receptacles(self) -> tuple[str, ...]:
        """The receptacles that stand somewhere, sorted by id."""
        return tuple(self.location_of)

    @cached_property
    def receptacles_at(self) -> dict[str, tuple[str, ...]]:
        """Location id to the receptacles reached from it; locations without any are absent."""
        found: dict[str, list[str]] = {}
        for receptacle, location in self.location_of.items():
            found.setdefault(location, []).append(receptacle)
        return {location: tuple(receptacles) for location, receptacles in found.items()}

    @cached_property
    def inner_objects(self) -> dict[str, tuple[str, ...]]:
        """Object id to the objects recorded inside of it (constant: no action moves them)."""
        found: dict[str, list[str]] = {}
        for inner, outer in sorted(self.facts["inreceptacleobject"]):
            if inner != outer:
                found.setdefault(outer, []).append(inner)
        return {outer: tuple(inner) for outer, inner in found.items()}

    @cached_property
    def blades(self) -> frozenset[str]:
        """Objects that can slice."""
        return frozenset(o for o, kind in self.facts["objecttype"] if kind in ("knifetype", "butterknifetype"))

    @cached_property
    def accepted_by(self) -> dict[str, frozenset[str]]:
        """Object id to the receptacles whose type can contain the object's type."""
        by_type: dict[str, set[str]] = {}
        types_of: dict[str, set[str]] = {}
        for receptacle, rtype in self.facts["receptacletype"]:
            types_of.setdefault(rtype, set()).add(receptacle)
        for rtype, otype in self.facts["cancontain"]:
            by_type.setdefault(otype, set()).update(types_of.get(rtype, ()))
        found: dict[str, set[str]] = {}
        for thing, otype in self.facts["objecttype"]:
            found.setdefault(thing, set()).update(by_type.get(otype, ()))
        return {thing: frozenset(receptacles) for thing, receptacles in found.items()}

    @cached_property
    def goto_commands(self) -> dict[str, str]:
        """Receptacle id to the command that walks to it."""
        return {receptacle: f"go to {self.names[receptacle]}" for receptacle in self.receptacles}

    @cached_property
    def tools(self) -> dict[str, frozenset[str]]:
        """Action kind ("clean", "heat", "cool") to the receptacles that carry it out."""
        kinds = {"clean": "sinkbasintype", "heat": "microwavetype", "cool": "fridgetype"}
        pairs = self.facts["receptacletype"]
        return {kind: frozenset(r for r, rtype in pairs if rtype == wanted) for kind, wanted in kinds.items()}

    @cached_property
    def members(self) -> dict[str, frozenset[str]]:
        """Unary predicate to the ids for which it holds at the start."""
        return {name: frozenset(a[0] for a in self.facts[name]) for name, args in PREDICATES.items() if len(args) == 1}


def problem_of(task: Task) -> HouseholdProblem:
    """The parsed game of a task, cached. Raises ArtifactError when the payload holds no usable `pddl_problem`."""
    text = task.payload.get("pddl_problem")
    if not isinstance(text, str) or not text.strip():
        raise ArtifactError(
            "a household task has no game",
            where=f"task {task.task_id}",
            expected="payload key pddl_problem with the text of a PDDL problem",
            found=type(text).__name__,
        )
    try:
        return parse_problem(text)
    except ArtifactError as error:
        raise ArtifactError(
            error.what,
            where=f"task {task.task_id}" + (f", {error.where}" if error.where else ""),
            expected=error.expected,
            found=error.found,
            remedy=error.remedy,
        ) from None


@lru_cache(maxsize=256)
def parse_problem(text: str) -> HouseholdProblem:
    """Read the text of one PDDL problem of the household domain.

    Raises ArtifactError for text that is not such a problem, or that needs more than the driver reproduces.
    """
    tree = _read_tree(text)
    sections: dict[str, list[Any]] = {part[0]: part[1:] for part in tree if isinstance(part, list) and part}
    for name in (":objects", ":init", ":goal"):
        if name not in sections:
            raise ArtifactError("a game lacks a section", where="pddl_problem", expected=f"({name} ...)")
    types = _read_objects(sections[":objects"])
    facts = _read_facts(sections[":init"], types)
    if len(sections[":goal"]) != 1:
        raise ArtifactError("a game needs exactly one goal", where="pddl_problem", found=len(sections[":goal"]))
    start = facts["atlocation"]
    if len(start) != 1 or sum(kind == "agent" for kind in types.values()) != 1:
        raise ArtifactError("a game needs one agent at one location", where="pddl_problem", found=sorted(start))
    agent, location = next(iter(start))
    places = Counter(receptacle for receptacle, _ in facts["receptacleatlocation"])
    for receptacle, count in places.items():
        if count > 1:
            raise ArtifactError("a receptacle stands at two locations", where="pddl_problem", found=receptacle)
    goal = parse_formula(sections[":goal"][0], PREDICATES, types)
    return HouseholdProblem(types, facts, _display_names(facts), goal, agent, location)


def _read_tree(text: str) -> list[Any]:
    """The nested lists of one parenthesised text, lower case, without comments."""
    stack: list[list[Any]] = [[]]
    for token in _tokens(text):
        if token == "(":
            stack.append([])
        elif token == ")":
            if len(stack) == 1:
                raise ArtifactError("a game has a parenthesis too many", where="pddl_problem")
            finished = stack.pop()
            stack[-1].append(finished)
        else:
            stack[-1].append(token)
    if len(stack) != 1 or len(stack[0]) != 1 or not isinstance(stack[0][0], list):
        raise ArtifactError("a game is not one balanced (define ...)", where="pddl_problem", found=text[:60])
    return stack[0][0]


def _tokens(text: str) -> Iterator[str]:
    if ";" in text:
        text = "\n".join(line.split(";", 1)[0] for line in text.split("\n"))
    if not text.isascii():
        raise ArtifactError("a game holds a character outside ASCII", where="pddl_problem")
    return iter(text.lower().replace("(", " ( ").replace(")", " ) ").replace("?", " ?").split())


def _read_objects(tokens: list[Any]) -> dict[str, str]:
    """`a b - type c - type` to {a: type, b: type, c: type}."""
    types: dict[str, str] = {}
    waiting: list[str] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        if token == "-":
            kind = tokens[position + 1] if position + 1 < len(tokens) else None
            if kind not in TYPES:
                raise ArtifactError(
                    "an object has an unknown type", where=":objects", expected=sorted(TYPES), found=kind
                )
            for name in waiting:
                if name in types:
                    raise ArtifactError("an object is declared twice", where=":objects", found=name)
                types[name] = kind
            waiting = []
            position += 2
            continue
        if not isinstance(token, str):
            raise ArtifactError("an object is not a name", where=":objects", found=token)
        waiting.append(token)
        position += 1
    if waiting:
        raise ArtifactError("an object has no type", where=":objects", found=waiting[0])
    return types


def _read_facts(entries: list[Any], types: Mapping[str, str]) -> dict[str, frozenset[Fact]]:
    found: dict[str, set[Fact]] = {name: set() for name in PREDICATES}
    for entry in entries:
        if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
            raise ArtifactError("an initial fact is not a list", where=":init", found=entry)
        if entry[0] in ("=", "not"):
            continue
        arguments = tuple(entry[1:])
        expected = PREDICATES.get(entry[0])
        if expected is None or len(arguments) != len(expected):
            raise ArtifactError("an initial fact is not of this domain", where=":init", found=" ".join(map(str, entry)))
        for argument, kind in zip(arguments, expected, strict=True):
            declared = types.get(argument) if isinstance(argument, str) else None
            if declared is None or (kind is not None and declared != kind):
                raise ArtifactError(
                    f"an argument of {entry[0]} has the wrong type",
                    where=":init",
                    expected=kind or "a declared object",
                    found=f"{argument} ({declared or 'not declared'})",
                )
        found[entry[0]].add(arguments)
    return {name: frozenset(arguments) for name, arguments in found.items()}


def _display_names(facts: Mapping[str, frozenset[Fact]]) -> dict[str, str]:
    """Ids to display names, numbered as the engine's wrapper does.

    >>> facts = {"pickupable": frozenset({("mug_bar_1",), ("mug_bar_2",), ("pen_bar_1",)})}
    >>> sorted(_display_names(facts).items())
    [('mug_bar_1', 'mug 2'), ('mug_bar_2', 'mug 1'), ('pen_bar_1', 'pen 1')]
    """
    ids = sorted({argument for arguments in facts.values() for fact in arguments for argument in fact})
    classes = {}
    for identifier in ids:
        name, separator, _ = identifier.partition("_bar_")
        if separator:
            classes[identifier] = name + ("basin" if "basin" in identifier else "")
    left = Counter(classes.values())
    names = {}
    for identifier in ids:
        if identifier not in classes:
            # An id without an instance part has no number; the engine leaves the blank before it.
            names[identifier] = f"{_plain(identifier)} "
            continue
        name = classes[identifier]
        names[identifier] = f"{name} {left[name]}"
        left[name] -= 1
    return names


def _plain(identifier: str) -> str:
    for mangled, character in (("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ",")):
        identifier = identifier.replace(mangled, character)
    return identifier
