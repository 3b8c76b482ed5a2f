"""The environment protocol, and how a name or an import string becomes an environment.

An environment is a factory of sessions. A session is one live episode; `Environment.start(task)` begins it from exactly
the task's initial state, as often as asked, and sessions never touch each other. Adding a world means one module that
offers these classes and an entry in `BUILTIN`, or `--set env.name=my_pkg.my_env:MyEnvironment`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from data.tasks import Panel, Task
from schemas.errors import ConfigError

BUILTIN: dict[str, str] = {
    "household": "data.household.environment:HouseholdEnvironment",
    "search": "data.search.environment:SearchEnvironment",
}


@dataclass(frozen=True)
class Observation:
    """What the environment says: the text, and the commands it would accept (empty where it does not list them)."""

    text: str
    admissible_commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """The answer to one action. `done` ends the episode; `won` is the outcome so far; `score` an optional finer outcome.

    `metrics` are further figures of the episode so far, by name; finite numbers that decide nothing and are recorded.
    """

    observation: Observation
    done: bool
    won: bool
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ParsedReply:
    """A policy's reply as the environment reads it: an action, or None and the reason why it is invalid."""

    action: str | None
    invalid_reason: str | None = None

    @property
    def valid(self) -> bool:
        return self.action is not None


@dataclass(frozen=True)
class Turn:
    """One past turn as prompts show it: what was seen, the raw reply, the action as parsed (None when invalid)."""

    observation: str
    reply: str
    action: str | None


class Session(Protocol):
    """One live episode."""

    @property
    def first_observation(self) -> Observation: ...

    @property
    def fingerprint(self) -> str:
        """sha256 of (task hash, first observation, admissible commands, environment version)."""

    def step(self, action: str) -> StepResult:
        """Carry out one parsed action. An action the world refuses changes nothing and says so in its text."""

    def reject(self, reason: str) -> StepResult:
        """The answer to a reply that holds no usable action; the state does not change."""

    def close(self) -> None: ...


class Prompts(Protocol):
    """The wording of one environment. Texts are plain strings; rendering into tokens happens in `stages.rendering`."""

    @property
    def system(self) -> str | None: ...

    def opening(self, task: Task, first: Observation, skill: str | None) -> str:
        """`append_only`: the first user message. With a skill, a titled block right after the task line; nothing else differs."""

    def follow_up(self, observation: Observation) -> str:
        """`append_only`: every later user message."""

    def window(
        self, task: Task, history: Sequence[Turn], turns_taken: int, observation: Observation, skill: str | None
    ) -> str:
        """`window`: the one user message of a turn; `history` holds the last H turns, oldest first."""

    def skill_request(self, task: Task, turns: Sequence[Turn], final: Observation, won: bool) -> str:
        """The user message that asks for a skill (JSON with `summary` and `skill`) from one finished episode."""


@runtime_checkable
class Environment(Protocol):
    """A world: its version, wording, reply format and sessions."""

    name: str
    version: str
    prompts: Prompts

    def start(self, task: Task) -> Session: ...

    def parse_reply(self, text: str, *, cut: bool) -> ParsedReply:
        """Read a reply; `cut` says that the length limit ended it, which makes it invalid (method section 4)."""

    def panel(self, source: str, *, limit: int | None = None) -> Panel:
        """Load a panel from a path or a source string of this environment."""


@runtime_checkable
class PreparesSteps(Protocol):
    """Optional: a world that can do work for many steps at once, such as one request for many look-ups."""

    def prepare(self, steps: Sequence[tuple[Session, str]]) -> None:
        """Called before these sessions are stepped with these actions. Changes no session; may only make steps faster."""


@runtime_checkable
class CountsWork(Protocol):
    """Optional: a world that counts what it does."""

    def counters(self) -> Mapping[str, float]:
        """Totals since the environment was built. They go to `timings`; `x_hits` and `x_misses` are shown as a share."""


@runtime_checkable
class ClosesResources(Protocol):
    """Optional: a world that holds connections or files."""

    def close(self) -> None:
        """Called when a stage or loop is done with the environment."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """What is needed to build an environment: a name or `module:Class`, and its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def target(self) -> str:
        """The import string of the class. Raises ConfigError for a name that is neither built in nor one."""
        target = BUILTIN.get(self.name, self.name)
        if ":" not in target:
            raise ConfigError(
                "unknown environment",
                where="env.name",
                expected=f"one of {', '.join(sorted(BUILTIN))} or an import string module:Class",
                found=repr(self.name),
            )
        return target

    def build(self) -> Environment:
        """Import and construct. Raises ConfigError when the name, the class or an option does not exist."""
        target = self.target()
        module_name, _, attribute = target.partition(":")
        try:
            factory = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError("cannot import the environment", where="env.name", found=f"{target} ({error})") from error
        try:
            return factory(**self.options)
        except TypeError as error:
            raise ConfigError("the environment refuses an option", where="env.options", found=str(error)) from error
