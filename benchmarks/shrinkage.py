"""Does shrinkage pay? Mean squared error of the raw gain, the type mean and the shrunk gain where the true gain is known.

Simulates tasks of several types: each task has a win probability without a skill, one with its skill, and a distribution of
turns; episodes are binary wins with turns, pushed through `utility`, and the estimators run step by step as in training.
The true gain of a task is the exact expected utility of a replay minus that of a control. Types whose tasks all share one
gain (between-task spread 0) are reported apart, because there the type mean is the best anyone can do.

    python benchmarks/shrinkage.py --seed 0 --tasks 96 --types 6

The columns: three mean squared errors, the shrunk one as a share of the better of the other two, and the standard error of
their difference over the same tasks. Prints one table for types that have a spread, one for types that have none, and exits 1 if the shrunk gain does not beat
both others in the first.

What to expect: with enough tasks of a type a step (the default, 16) the shrunk gain wins for every K. With few (`--tasks 16`,
2 to 3 a type) and K = 2 the spread tau is estimated too poorly and shrinking all the way to the type mean is as good or a
few per cent better, depending on the seed; from K = 4 on the shrunk gain wins there too. Without any spread the type mean
wins, since an estimate of tau that may not be negative is above 0 half the time; the shrunk gain's error is then about
twice as large, and still around one hundredth of the raw gain's.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass

import numpy as np

from stages.estimators import replay_gains, task_moments, utility
from stages.type_statistics import Statistics, TaskGains, shrink, update_statistics

MAX_TURNS = 30
CONTROLS = 4  # control episodes a task: half of G = 8
WARM_UP_STEPS = 5  # steps before errors are counted, so that the moving averages have seen something


@dataclass(frozen=True)
class World:
    """What is true of each type `(C,)`: win probability without a skill, mean and spread of the change a skill brings."""

    base_win: np.ndarray
    effect: np.ndarray
    spread: np.ndarray
    turns_with: np.ndarray  # mean turns of a won replay
    turns_without: np.ndarray


def make_world(types: int, spread: bool, rng: np.random.Generator) -> World:
    """Types between easy and hard, skills between harmful and helpful; a spread between 0.1 and 0.25, or none."""
    return World(
        base_win=rng.uniform(0.2, 0.7, types),
        effect=rng.uniform(-0.15, 0.3, types),
        spread=rng.uniform(0.1, 0.25, types) if spread else np.zeros(types),
        turns_with=rng.uniform(8, 14, types),
        turns_without=rng.uniform(12, 20, types),
    )


def winning_turns(mean: np.ndarray, episodes: int, rng: np.random.Generator) -> np.ndarray:
    """Turns of `(Q, episodes)` won episodes: 1 + binomial(MAX_TURNS - 1), whose mean is exactly `mean` `(Q,)`."""
    share = (mean - 1.0) / (MAX_TURNS - 1.0)
    return 1 + rng.binomial(MAX_TURNS - 1, share[:, None], (len(mean), episodes))


def play(win: np.ndarray, mean_turns: np.ndarray, episodes: int, rng: np.random.Generator):
    """Task moments of `episodes` episodes a task, and the exact expected utility `(Q,)`."""
    won = rng.random((len(win), episodes)) < win[:, None]
    turns = np.where(won, winning_turns(mean_turns, episodes, rng), MAX_TURNS)
    tasks = np.repeat(np.arange(len(win)), episodes)
    moments = task_moments(utility(won, turns, MAX_TURNS).ravel(), tasks, len(win))
    return moments, win * utility(1.0, mean_turns, MAX_TURNS)  # utility is linear in the turns


def one_step(world: World, tasks: int, replays: int, rng: np.random.Generator) -> tuple[TaskGains, np.ndarray]:
    """Gains of one training step and the true gains, `(Q,)`."""
    types = len(world.base_win)
    type_Q = rng.integers(0, types, tasks)
    base = np.clip(world.base_win[type_Q] + rng.normal(0.0, 0.1, tasks), 0.02, 0.98)
    skilled = np.clip(base + world.effect[type_Q] + world.spread[type_Q] * rng.normal(0.0, 1.0, tasks), 0.0, 1.0)
    if not world.spread.any():  # one true gain a type needs one win probability a type, too
        base = world.base_win[type_Q]
        skilled = np.clip(base + world.effect[type_Q], 0.0, 1.0)
    replay, with_skill = play(skilled, world.turns_with[type_Q], replays, rng)
    control, without = play(base, world.turns_without[type_Q], CONTROLS, rng)
    names = tuple(f"type-{code}" for code in range(types))
    return TaskGains(replay_gains(replay, control), replay, control, type_Q, names), with_skill - without


def squared_errors(world: World, tasks: int, steps: int, replays: int, rng: np.random.Generator) -> np.ndarray:
    """Squared errors of raw gain, type mean and shrunk gain, `(3, N)`, over all counted steps."""
    statistics, errors = Statistics(), []
    for step in range(WARM_UP_STEPS + steps):
        gains, truth = one_step(world, tasks, replays, rng)
        statistics = update_statistics(statistics, gains)
        found = shrink(statistics, gains)
        if step >= WARM_UP_STEPS:
            errors.append([(value - truth) ** 2 for value in (gains.gain_Q, found.type_mean_Q, found.shrunk_gain_Q)])
    return np.concatenate([np.array(step_errors) for step_errors in errors], axis=1)


def report(spread: bool, args: argparse.Namespace) -> bool:
    """Print one table; True if the shrunk gain has the smallest error for every K."""
    print(f"{'types with a spread of true gains' if spread else 'types without any spread (tau = 0)'}")
    print(f"{'K':>3} {'raw':>9} {'type mean':>10} {'shrunk':>9} {'of the better':>14} {'standard error':>15}")
    best = True
    for replays in args.replays:
        # The same worlds for every K, so that the rows of the table differ in K alone.
        worlds = [make_world(args.types, spread, np.random.default_rng([args.seed, w])) for w in range(args.worlds)]
        rng = np.random.default_rng([args.seed, args.worlds, int(spread), replays])
        errors = [squared_errors(world, args.tasks, args.steps, replays, rng) for world in worlds]
        errors = np.concatenate(errors, axis=1)
        raw, mean, shrunk = errors.mean(axis=1)
        better = int(mean < raw)
        # Paired over the same tasks: how sure the difference to the better of the two is.
        error = (errors[2] - errors[better]).std(ddof=1) / math.sqrt(errors.shape[1])
        best &= bool(shrunk < min(raw, mean))
        print(f"{replays:>3} {raw:>9.5f} {mean:>10.5f} {shrunk:>9.5f} {shrunk / min(raw, mean):>13.1%} {error:>15.5f}")
    print()
    return best


def main() -> int:
    """Run both tables; the exit code says whether shrinkage won where there is something to shrink."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=96, help="tasks a step")
    parser.add_argument("--types", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40, help="counted steps of each world")
    parser.add_argument("--worlds", type=int, default=10, help="independent draws of the types")
    parser.add_argument("--replays", type=int, nargs="+", default=[2, 4, 8], help="values of K")
    args = parser.parse_args()
    won = report(spread=True, args=args)
    report(spread=False, args=args)
    print("shrunk below both raw and type mean for every K: " + ("yes" if won else "NO"))
    return 0 if won else 1


if __name__ == "__main__":
    sys.exit(main())
