"""A game's goal: the formula as read, and a form that is cheap to evaluate after every step.

Nested `exists`/`and` are flattened into one search over all their variables. Facts that no action changes shrink each
variable's domain beforehand, and every condition is checked as soon as its last variable is bound, so that goals about
two objects cost a handful of look-ups. All other formulas (`or`, `not`, `forall`, `imply`, `=`) are evaluated as
written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from schemas.errors import ArtifactError

# What some action of the domain can change; every other predicate is constant during an episode.
DYNAMIC = frozenset(
    {
        "atlocation",
        "opened",
        "checked",
        "inreceptacle",
        "objectatlocation",
        "holds",
        "holdsany",
        "isclean",
        "ishot",
        "iscool",
        "ison",
        "istoggled",
        "issliced",
    }
)


class FactSource(Protocol):
    """A state that can answer whether a ground fact holds."""

    def holds(self, predicate: str, arguments: tuple[str, ...]) -> bool: ...


Binding = dict[str, str]
Check = Callable[[FactSource, Binding], bool]


@dataclass(frozen=True)
class Formula:
    """A parsed formula. `kind` is and, or, not, imply, exists, forall, = or atom.

    `parts` are the sub-formulas; `variables` the (name, type) pairs of a quantifier; `predicate` and `arguments`
    belong to atoms (and `arguments` to =). Variables start with "?".
    """

    kind: str
    parts: tuple[Formula, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    predicate: str = ""
    arguments: tuple[str, ...] = ()


def parse_formula(tree: Any, predicates: Mapping[str, tuple[Any, ...]], types: Mapping[str, str]) -> Formula:
    """Nested lists to a Formula, every bound variable under a name of its own.

    Raises ArtifactError for an unknown connective, predicate, arity or free name.
    """
    return _Reader(predicates, types).read(tree, {})


class _Reader:
    """Reads one formula; counts its variables so that no two quantifiers share a name."""

    def __init__(self, predicates: Mapping[str, tuple[Any, ...]], types: Mapping[str, str]) -> None:
        self._predicates, self._types, self._counter = predicates, types, count()

    def read(self, tree: Any, scope: Mapping[str, str]) -> Formula:
        if not isinstance(tree, list):
            raise ArtifactError("a goal holds a name where a formula belongs", where=":goal", found=tree)
        if not tree:
            return Formula("and")
        head, rest = tree[0], tree[1:]
        if head in ("and", "or", "imply", "not"):
            if (head == "not" and len(rest) != 1) or (head == "imply" and len(rest) != 2):
                raise ArtifactError(f"`{head}` has the wrong number of parts", where=":goal", found=len(rest))
            return Formula(head, tuple(self.read(part, scope) for part in rest))
        if head in ("exists", "forall"):
            return self._read_quantifier(head, rest, scope)
        arguments = tuple(self._argument(name, scope) for name in rest)
        if head == "=" and len(arguments) == 2:
            return Formula("=", arguments=arguments)
        if not isinstance(head, str) or len(self._predicates.get(head, [None] * (len(rest) + 1))) != len(rest):
            raise ArtifactError("a goal names something that is not of this domain", where=":goal", found=tree)
        return Formula("atom", predicate=head, arguments=arguments)

    def _read_quantifier(self, head: str, rest: list[Any], scope: Mapping[str, str]) -> Formula:
        if len(rest) != 2 or not isinstance(rest[0], list):
            raise ArtifactError(f"`{head}` needs variables and one formula", where=":goal", found=rest)
        inner, variables = dict(scope), []
        for name, kind in _typed_variables(rest[0]):
            inner[name] = f"{name}#{next(self._counter)}"
            variables.append((inner[name], kind))
        return Formula(head, (self.read(rest[1], inner),), tuple(variables))

    def _argument(self, name: Any, scope: Mapping[str, str]) -> str:
        if isinstance(name, str) and name in scope:
            return scope[name]
        if not isinstance(name, str) or name not in self._types:
            raise ArtifactError("a goal names an undeclared object", where=":goal", found=name)
        return name


def _typed_variables(tokens: list[Any]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    waiting: list[str] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        if token == "-" and position + 1 < len(tokens):
            found += [(name, tokens[position + 1]) for name in waiting]
            waiting = []
            position += 2
        elif isinstance(token, str) and token.startswith("?"):
            waiting.append(token)
            position += 1
        else:
            raise ArtifactError("a quantifier's variables cannot be read", where=":goal", found=tokens)
    return found + [(name, "object") for name in waiting]


class Goal:
    """A goal prepared for one game; `reached(state)` evaluates it. Holds no state of its own."""

    def __init__(
        self, formula: Formula, types: Mapping[str, str], facts: Mapping[str, frozenset[tuple[str, ...]]]
    ) -> None:
        self._types, self._facts = types, facts
        self._check = self._prepare(formula)

    def reached(self, state: FactSource) -> bool:
        """Whether the goal holds in `state`."""
        return self._check(state, {})

    def _prepare(self, formula: Formula) -> Check:
        if formula.kind == "atom":
            return _atom_check(formula)
        if formula.kind == "=":
            left, right = formula.arguments
            return lambda state, binding: binding.get(left, left) == binding.get(right, right)
        if formula.kind == "exists":
            return self._prepare_search(formula)
        if formula.kind == "forall":
            found = self._prepare_search(Formula("exists", (Formula("not", formula.parts),), formula.variables))
            return lambda state, binding: not found(state, binding)
        parts = [self._prepare(part) for part in formula.parts]
        if formula.kind == "not":
            return lambda state, binding: not parts[0](state, binding)
        if formula.kind == "or":
            return lambda state, binding: any(part(state, binding) for part in parts)
        if formula.kind == "imply":
            return lambda state, binding: not parts[0](state, binding) or parts[1](state, binding)
        return lambda state, binding: all(part(state, binding) for part in parts)

    def _prepare_search(self, formula: Formula) -> Check:
        variables, conditions = _flatten(formula)
        domains = {name: self._domain(name, kind, conditions) for name, kind in variables}
        names_of = [_names(condition) & domains.keys() for condition in conditions]
        checks = [self._prepare(condition) for condition in conditions]
        first = [check for check, names in zip(checks, names_of, strict=True) if not names]
        order: list[tuple[str, tuple[str, ...], list[Check]]] = []
        bound: set[str] = set()
        while len(bound) < len(domains):
            free = [name for name in domains if name not in bound]
            name = min(free, key=lambda n: (not _closes(n, bound, names_of), len(domains[n])))
            bound.add(name)
            ready = [check for check, names in zip(checks, names_of, strict=True) if name in names and names <= bound]
            order.append((name, domains[name], ready))

        def search(state: FactSource, binding: Binding, depth: int = 0) -> bool:
            if depth == len(order):
                return True
            name, domain, ready = order[depth]
            for value in domain:
                binding[name] = value
                if all(check(state, binding) for check in ready) and search(state, binding, depth + 1):
                    return True
            return False

        return lambda state, binding: all(check(state, binding) for check in first) and search(state, dict(binding))

    def _domain(self, name: str, kind: str, conditions: list[Formula]) -> tuple[str, ...]:
        """The objects of a variable's type that no constant fact rules out, sorted."""
        # "object" is the root of the domain's types: a variable of that type ranges over everything.
        domain = {thing for thing, declared in self._types.items() if kind in ("object", declared)}
        for condition in conditions:
            if condition.kind != "atom" or condition.predicate in DYNAMIC or name not in condition.arguments:
                continue
            position = condition.arguments.index(name)
            domain &= {fact[position] for fact in self._facts[condition.predicate] if _fits(fact, condition.arguments)}
        return tuple(sorted(domain))


def _atom_check(formula: Formula) -> Check:
    predicate, arguments = formula.predicate, formula.arguments
    return lambda state, binding: state.holds(predicate, tuple([binding.get(a, a) for a in arguments]))


def _fits(fact: tuple[str, ...], arguments: tuple[str, ...]) -> bool:
    return all(argument.startswith("?") or argument == value for argument, value in zip(arguments, fact, strict=True))


def _closes(name: str, bound: set[str], names_of: list[set[str]]) -> bool:
    """Whether binding `name` makes some condition checkable."""
    return any(name in names and names <= bound | {name} for names in names_of)


def _flatten(formula: Formula) -> tuple[list[tuple[str, str]], list[Formula]]:
    """All variables and conditions of directly nested `exists` and `and`. Names are unique already."""
    if formula.kind == "exists":
        variables, conditions = _flatten(formula.parts[0])
        return [*formula.variables, *variables], conditions
    if formula.kind == "and":
        variables, conditions = [], []
        for part in formula.parts:
            inner_variables, inner_conditions = _flatten(part)
            variables += inner_variables
            conditions += inner_conditions
        return variables, conditions
    return [], [formula]


def _names(formula: Formula) -> set[str]:
    """Every variable that occurs in a formula."""
    found = {argument for argument in formula.arguments if argument.startswith("?")}
    for part in formula.parts:
        found |= _names(part)
    return found
