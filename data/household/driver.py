"""The fast driver: one live game over our own state, with the stock engine's text, commands and outcome.

Nothing of the engine is imported at run time. Sessions share only the parsed problem, which never changes, so any
number of them interleave; a session can be cloned at any point.

One known difference: a game whose goal cannot be reached even in principle is refused by the stock engine when it is
loaded and simply never won here. Generated panels hold none, and loading a panel is no proof that a game can be won.
"""

from __future__ import annotations

import hashlib
import json
import time
from functools import cached_property

from data.environments import Observation, StepResult
from data.household.problem import problem_of
from data.household.replies import rejection_text
from data.household.wording import NOTHING_HAPPENS, feedback, introduction
from data.household.world import HouseholdWorld
from data.tasks import Task
from schemas.errors import EnvironmentTimeout

DRIVER_REVISION = 1


def fingerprint_of(task: Task, first: Observation, version: str) -> str:
    """sha256 of (task hash, first observation, admissible commands, environment version) as hexadecimal text."""
    content = [task.sha256, first.text, list(first.admissible_commands), version]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()


def check_elapsed(started: float, limit_seconds: float, what: str, task: Task) -> None:
    """Raise EnvironmentTimeout when more than `limit_seconds` of wall clock passed since `started` (time.monotonic()).

    The check comes after the call: a session lives in the caller's process, where a running call cannot be interrupted
    safely. A call that never returns is the business of the process around it.
    """
    elapsed = time.monotonic() - started
    if elapsed > limit_seconds:
        raise EnvironmentTimeout(
            f"the household engine took too long to {what}",
            where=f"task {task.task_id}",
            expected=f"at most {limit_seconds:g} s",
            found=f"{elapsed:.1f} s",
            remedy=f"raise env.options.{what}_timeout_seconds",
        )


class HouseholdSession:
    """One live game; implements `data.environments.Session`. `world` gives read access to the state."""

    def __init__(
        self, task: Task, version: str, *, reset_timeout_seconds: float = 30.0, step_timeout_seconds: float = 10.0
    ) -> None:
        started = time.monotonic()
        self.task, self.version = task, version
        self.world = HouseholdWorld(problem_of(task))
        self._step_timeout_seconds = step_timeout_seconds
        self._first = Observation(introduction(self.world, task.text), self._admissible())
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
        """Carry out a command; one that is not admissible answers "Nothing happens." and changes nothing.

        A game that is won goes on when stepped further, as in the stock engine.
        """
        started = time.monotonic()
        move = self.world.commands().get(action.strip())
        if move is None:
            result = self._result(NOTHING_HAPPENS)
        else:
            self.world.apply(move)
            result = self._result(feedback(self.world, move))
        check_elapsed(started, self._step_timeout_seconds, "step", self.task)
        return result

    def reject(self, reason: str) -> StepResult:
        """Say that a reply held no usable action. The state does not change."""
        text = rejection_text(reason)
        return StepResult(Observation(text, self._admissible()), done=False, won=self.world.won())

    def clone(self) -> HouseholdSession:
        """An independent session in the same state; it shares the first observation and the fingerprint."""
        copy = object.__new__(HouseholdSession)
        copy.__dict__.update(self.__dict__)
        copy.world = self.world.clone()
        return copy

    def close(self) -> None:
        """Nothing to free."""

    def _admissible(self) -> tuple[str, ...]:
        return tuple(sorted(self.world.commands()))

    def _result(self, text: str) -> StepResult:
        won = self.world.won()
        return StepResult(Observation(text, self._admissible()), done=won, won=won)
