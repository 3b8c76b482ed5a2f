"""Measure the fast household driver against the stock engine: steps and resets per second, side by side in one run.

Both engines play the same games with the same commands, taking turns command by command, so that a busy machine slows
both alike. A reset is what starting a session of a known game costs (the stock engine has loaded it before, the fast
driver has read it before); `first start` is what a game costs the first time. Every answer is compared on the way.

    python benchmarks/household_driver.py --games 6 --steps 40
    python benchmarks/household_driver.py --games ../shared/alfworld/valid_seen.jsonl.xz --steps 40 --limit 6

Exit code 1 when an answer differs or when a ratio is below the requirement (20 for steps, 5 for resets).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.environments import Session, StepResult
from data.household.catalog import TASK_TYPES
from data.household.environment import HouseholdEnvironment
from data.household.generator import generate_task
from data.household.problem import parse_problem
from data.tasks import Task

REQUIRED = {"step": 20.0, "reset": 5.0}


@dataclass
class Times:
    """Seconds of every call of one driver."""

    step: list[float] = field(default_factory=list)
    reset: list[float] = field(default_factory=list)
    first_start: list[float] = field(default_factory=list)

    def rate(self, kind: str) -> float:
        """Calls per second."""
        values = getattr(self, kind)
        return len(values) / sum(values)


def games(source: str, limit: int) -> list[Task]:
    """`limit` generated full-size games (source: a number) or the games of a panel, spread over its length."""
    if source.isdigit():
        kinds = [TASK_TYPES[index % len(TASK_TYPES)] for index in range(int(source))]
        return [generate_task(1, i, task_type=kind, size="full", split="train") for i, kind in enumerate(kinds)]
    tasks = HouseholdEnvironment().panel(source).tasks
    return list(tasks[:: max(1, len(tasks) // limit)])[:limit]


def timed_start(environment: HouseholdEnvironment, task: Task, into: list[float]) -> Session:
    """A session, and the seconds its start took."""
    started = time.perf_counter()
    session = environment.start(task)
    into.append(time.perf_counter() - started)
    return session


def timed_step(session: Session, command: str, into: list[float]) -> StepResult:
    """An answer, and the seconds it took."""
    started = time.perf_counter()
    result = session.step(command)
    into.append(time.perf_counter() - started)
    return result


def measure(task: Task, environments: dict[str, HouseholdEnvironment], times: dict[str, Times], steps: int) -> int:
    """Play one game in both drivers; the number of answers that differ."""
    parse_problem.cache_clear()
    for name, environment in environments.items():
        timed_start(environment, task, times[name].first_start).close()
    sessions = {name: timed_start(environment, task, times[name].reset) for name, environment in environments.items()}
    first = {name: session.first_observation for name, session in sessions.items()}
    differing = int(first["fast"] != first["stock"])
    rng, commands = random.Random(task.task_id), first["stock"].admissible_commands
    for _ in range(steps):
        hands_on = [c for c in commands if c.split()[0] not in ("go", "look", "inventory", "help")]
        command = rng.choice(hands_on if hands_on and rng.random() < 0.5 else commands)
        answers = {name: timed_step(session, command, times[name].step) for name, session in sessions.items()}
        differing += answers["fast"] != answers["stock"]
        commands = answers["stock"].observation.admissible_commands
    for session in sessions.values():
        session.close()
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--games", default="6", help="a number of generated full-size games, or a panel source")
    parser.add_argument("--steps", type=int, default=40, help="commands per game")
    parser.add_argument("--limit", type=int, default=6, help="games taken from a panel source")
    options = parser.parse_args()
    patience = {"reset_timeout_seconds": 600.0, "step_timeout_seconds": 600.0}
    environments = {name: HouseholdEnvironment(driver=name, **patience) for name in ("stock", "fast")}
    times = {name: Times() for name in environments}
    tasks = games(options.games, options.limit)
    # Imports and the engine's own warm-up belong to no game.
    environments["stock"].start(tasks[0]).close()
    differing = sum(measure(task, environments, times, options.steps) for task in tasks)
    print(f"{len(tasks)} games ({options.games}), {options.steps} commands each, {differing} answers differ")
    print(f"{'':12}{'stock /s':>12}{'fast /s':>12}{'ratio':>10}   required")
    good = differing == 0
    for kind in ("step", "reset", "first_start"):
        stock, fast = times["stock"].rate(kind), times["fast"].rate(kind)
        required = REQUIRED.get(kind)
        good &= required is None or fast / stock >= required
        wanted = f">= {required:g}" if required else "-"
        print(f"{kind.replace('_', ' '):12}{stock:12.2f}{fast:12.1f}{fast / stock:10.0f}   {wanted}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
