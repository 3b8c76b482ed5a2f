"""The stock household engine behind the same session interface: slow, exact by definition, used for parity tests and
`driver = "stock"`.

A game is loaded once and reset many times. A loaded engine holds one live state, so a game's engines form a pool: a
session borrows one and gives it back when closed; two live sessions never share one. textworld and alfworld are
imported when the first session starts, which creates alfworld's cache folder in the home directory. Their `shuffle`
stays off: it draws from the global random state.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from data.environments import Observation, StepResult
from data.household.driver import check_elapsed, fingerprint_of
from data.household.edition import installed_files
from data.household.problem import problem_of
from data.household.replies import rejection_text
from data.tasks import Task
from schemas.errors import EnvironmentFault

STOCK_REVISION = 1
MOST_IDLE_ENGINES = 64

_GRAMMAR_SYMBOLS = '#[]{}|;<>"\\'

_idle: dict[str, list[Any]] = {}


@contextmanager
def _kept_arguments() -> Iterator[None]:
    """Put `sys.argv` back: the engine's translator overwrites it whenever it reads a game."""
    arguments = sys.argv
    try:
        yield
    finally:
        sys.argv = arguments


def load_engine(task: Task) -> Any:
    """A stock engine with the task's game loaded and not yet reset.

    Raises EnvironmentFault when the engine cannot be imported or refuses the game, ArtifactError for a malformed game.
    """
    problem_of(task)  # Our own reader gives the clearer message for a malformed game.
    if any(symbol in task.text for symbol in _GRAMMAR_SYMBOLS):
        raise EnvironmentFault(
            "the stock engine cannot say this task text: it reads some characters as grammar",
            where=f"task {task.task_id}",
            expected=f"a text without {_GRAMMAR_SYMBOLS}",
            found=repr(task.text),
        )
    domain, grammar = installed_files()
    words = json.dumps(task.text)[1:-1]
    game = {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL", words),
        "pddl_problem": task.payload["pddl_problem"],
    }
    try:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.envs.pddl import PddlEnv
    except ImportError as error:
        raise EnvironmentFault(
            "the stock household engine cannot be imported", found=str(error), remedy="pip install alfworld==0.4.2"
        ) from error
    engine = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)), shuffle=False)
    try:
        with _kept_arguments():
            engine.load(game)
    except Exception as error:  # The engine raises whatever its parsers and its C++ library raise.
        raise EnvironmentFault(
            "the stock household engine refuses a game",
            where=f"task {task.task_id}",
            found=f"{type(error).__name__}: {error}",
        ) from error
    return engine


class StockSession:
    """One live game of the stock engine; implements `data.environments.Session`."""

    def __init__(
        self, task: Task, version: str, *, reset_timeout_seconds: float = 30.0, step_timeout_seconds: float = 10.0
    ) -> None:
        started = time.monotonic()
        self.task, self.version = task, version
        self._step_timeout_seconds = step_timeout_seconds
        waiting = _idle.get(task.sha256)
        self._engine = waiting.pop() if waiting else load_engine(task)
        with _kept_arguments():
            self._state = self._engine.reset()
        self._first = self._observe(self._state.feedback)
        check_elapsed(started, reset_timeout_seconds, "reset", task)

    @property
    def first_observation(self) -> Observation:
        """The banner, the room, the task, and the commands possible at the start."""
        return self._first

    @cached_property
    def fingerprint(self) -> str:
        """See `data.environments.Session.fingerprint`."""
        return fingerprint_of(self.task, self._first, self.version)

    def step(self, action: str) -> StepResult:
        """Carry out a command; see `HouseholdSession.step`."""
        started = time.monotonic()
        self._state, _, done = self._live_engine().step(action)
        check_elapsed(started, self._step_timeout_seconds, "step", self.task)
        return StepResult(self._observe(self._state.feedback), done=bool(done), won=bool(self._state["won"]))

    def reject(self, reason: str) -> StepResult:
        """Say that a reply held no usable action. The state does not change."""
        return StepResult(self._observe(rejection_text(reason)), done=False, won=bool(self._state["won"]))

    def close(self) -> None:
        """Give the engine back for another session of the same game."""
        if self._engine is None:
            return
        if sum(map(len, _idle.values())) < MOST_IDLE_ENGINES:
            _idle.setdefault(self.task.sha256, []).append(self._engine)
        self._engine = None

    def _live_engine(self) -> Any:
        if self._engine is None:
            raise EnvironmentFault("a closed session cannot be stepped", where=f"task {self.task.task_id}")
        return self._engine

    def _observe(self, text: str) -> Observation:
        return Observation(text, tuple(self._state["admissible_commands"]))
