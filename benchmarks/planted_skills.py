"""Does the method behave? Planted skills of known worth go through the real stages; gain and trust must say what they are.

On held-out generated tasks of all types of a preset's world the policy plays G episodes a task without a skill (stage `rollout`). Then, for
every condition, it plays K episodes a task from the same state with a planted skill in its context: the table `skills` is
written here instead of by the policy, `replays` are real episodes, and the stage `estimate-gains` does the rest.

    good     a workflow that reaches the goal           shrunk gain > 0 and trust > 1
    harmful  a workflow that leaves out or swaps steps  shrunk gain < 0 and trust < 1
    vague    advice that says nothing about the goal    trust near 1
    none     no skill in the context: no effect at all  trust near 1

    python benchmarks/planted_skills.py [--preset household-tiny] [--tasks 48] [--group-size 8] [--replays 8] [--seed 0]

"To be sure" means two standard errors of the mean raw gain over tasks. That error serves the shrunk gain, too: shrinkage
moves tasks to their type's mean and leaves the overall mean about where it was, so the spread of shrunk gains says nothing
about how well the mean is known. All conditions share the episodes without a skill, so their errors go the same way.
Exit code 1 when a condition is not what it should be.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.household import demonstrator as household
from data.household import skill_texts as household_texts
from data.progress import Reporter
from data.search import demonstrator as search
from data.search import skill_texts as search_texts
from data.seeds import derive_seed
from data.tasks import Task
from rsipo_cli.console import json_text, make_reporter
from rsipo_cli.failures import guarded
from schemas.artifacts import read_manifest, sha256_json
from schemas.config_loading import code_version, load_config
from schemas.run_directory import RunDirectory
from schemas.table_io import finish_step, parts_done, read_table, write_part
from stages import estimate_gains, replay, rollout
from stages.episode_progress import EpisodeProgress
from stages.episode_records import EpisodeRecord
from stages.part_publishing import Rows, chunks
from stages.stage import open_stage
from stages.workbench import Workbench

STEP = 1
EXPECTED = {"good": "helps", "harmful": "harms", "vague": "nothing", "none": "nothing"}
SURE = 2.0  # standard errors
HELD_OUT = {  # by environment: tasks on which the policy was not trained, all types in turn
    "household": "generated:size=small,split=valid_seen,seed={seed},count={tasks}",
    "search": "generated:articles=3000,seed=1,split=test,count={tasks},draw={seed}",
}

TaskGroup = tuple[Task, list[EpisodeRecord]]  # a task and its episodes without a skill


@dataclass(frozen=True)
class Figures:
    """What the stages found for one condition; means over the scored tasks."""

    condition: str
    tasks: int  # with a gain
    replays: int  # episodes that count
    student_success: float
    teacher_success: float
    student_utility: float
    teacher_utility: float
    gain: float
    gain_error: float  # standard error of `gain` over tasks
    shrunk_gain: float
    trust: float
    trust_above_one: float  # share of tasks


@dataclass(frozen=True)
class Verdict:
    """Whether a condition is what it should be, and a few words why."""

    good: bool
    text: str


def planted_skill(condition: str, task: Task, seed: int) -> str:
    """The text planted for a task; empty for the condition `none`."""
    rng = random.Random(derive_seed(seed, "planted", condition, task.task_id))
    if condition == "none":
        return ""
    if task.task_type in household.GOOD_PLANS:
        if condition == "vague":
            return household_texts.vague_skill(rng)
        steps = household.GOOD_PLANS[task.task_type]
        if condition == "harmful":
            steps = rng.choice(household.bad_plans(task.task_type))
        return household_texts.skill_text(steps, rng)
    if condition == "vague":
        return search_texts.vague_skill(rng)
    searches = search.good_plan(task.task_type)
    if condition == "harmful":
        searches = rng.choice(search.bad_plans(task.task_type))
    return search_texts.skill_text(searches, rng)


def judge(figures: Figures, *, trust_slope: float, tolerance: float) -> Verdict:
    """Compare a condition with what its skills are worth; see the module's docstring for the rules."""
    margin = SURE * figures.gain_error
    expectation = EXPECTED[figures.condition]
    if not math.isfinite(margin):
        return Verdict(False, "NOT SURE: fewer than two tasks have a gain")
    if expectation == "nothing":
        off = abs(figures.trust - 1.0)
        if off <= tolerance:
            return Verdict(True, f"yes: trust within {tolerance:g} of 1")
        sure = off - trust_slope * margin > tolerance
        return Verdict(False, f"{'NO' if sure else 'NOT SURE'}: trust is {off:.3f} off 1, tolerance {tolerance:g}")
    sign = 1.0 if expectation == "helps" else -1.0
    wanted = f"shrunk gain {'above' if sign > 0 else 'below'} 0 and trust {'above' if sign > 0 else 'below'} 1"
    if sign * figures.shrunk_gain <= 0 or sign * (figures.trust - 1.0) <= 0:
        return Verdict(False, f"NO: expected {wanted}")
    if sign * figures.shrunk_gain <= margin:
        return Verdict(False, f"NOT SURE: shrunk gain within {SURE:g} standard errors of 0; play more")
    return Verdict(True, f"yes: {wanted}")


def play_planted(
    bench: Workbench, target: RunDirectory, condition: str, groups: Sequence[TaskGroup], reporter: Reporter
) -> None:
    """Publish `skills`, `replay_turns` and `replays` of one condition; parts that are there are not played again."""
    config = target.config
    skills = [_skill_row(condition, task, config.run.seed, bench.weights_sha256(STEP - 1)) for task, _ in groups]
    inputs = {
        "weights": bench.weights_sha256(STEP - 1),
        "rollouts": read_manifest(bench.run.step_dir("rollouts", STEP), verify=False).sha256,
        "skills": sha256_json([row["skill"] for row in skills]),
        "code": code_version(),
    }
    if not open_stage(target, replay.STAGE, STEP, replay.TABLES, inputs, True):
        return
    row_of = {row["task_id"]: row for row in skills}
    done = parts_done(target, replay.TABLES, STEP, sha256_json(inputs))
    reporter.stage(f"replay, {condition}", len(groups) * config.replay.replays, "episodes")
    for number, part in enumerate(chunks(groups, config.rollout.groups_per_part)):
        if number in done:
            reporter.advance(len(part) * config.replay.replays)
            continue
        rows = _part_rows(bench, part, row_of, reporter)
        write_part(target, STEP, number, rows, sha256_json(inputs))
    reporter.done()
    finish_step(target, replay.TABLES, STEP, kind=replay.STAGE, inputs=inputs, extra={"planted": condition})


def _skill_row(condition: str, task: Task, seed: int, weights_sha256: str) -> dict[str, object]:
    """A row of `skills` that no policy wrote. The text of `none` is empty and not null: a null skill has no replays."""
    text = planted_skill(condition, task, seed)
    return {
        "step": STEP,
        "skill_id": f"planted-{condition}-{task.sha256[:12]}",
        "task_id": task.task_id,
        "task_type": task.task_type,
        "prompt_token_ids": [],
        "token_ids": [],
        "behaviour_logprobs": [],
        "temperature": 1.0,
        "text": text,
        "skill": text,
        "seed": derive_seed(seed, "planted", condition, task.task_id),
        "weights_sha256": weights_sha256,
    } | dict.fromkeys(("source_episode_id", "source_won", "summary", "reason", "stop_reason"))


def _part_rows(
    bench: Workbench, groups: Sequence[TaskGroup], row_of: dict[str, dict], reporter: Reporter
) -> dict[str, Rows]:
    """K episodes of every task in the part, all conditions with the seeds of the stage `replay`."""
    from stages.episodes import EpisodeJob, play

    config = bench.config
    jobs = [
        EpisodeJob(
            task=task,
            index=index,
            seed=derive_seed(config.run.seed, replay.STAGE, STEP, task.task_id, index),
            skill=row_of[task.task_id]["skill"] or None,
            skill_id=row_of[task.task_id]["skill_id"],
            episode_id=rollout.episode_id("p", STEP, task, index),
        )
        for task, _ in groups
        for index in range(config.replay.replays)
    ]
    records = play(
        bench.engine(STEP - 1),
        bench.environment,
        bench.renderer(STEP - 1),
        jobs,
        limits=bench.limits,
        temperature=config.rollout.temperature,
        reporter=reporter,
        batch_episodes=None,
    )
    records = replay.exclude_other_starts(
        records,
        {
            task.task_id: replay.start_fingerprint([rollout.fingerprint for rollout in rollouts])
            for task, rollouts in groups
        },
    )
    weights = bench.weights_sha256(STEP - 1)
    return {
        "skills": [row_of[task.task_id] for task, _ in groups],
        "replay_turns": [row for record in records for row in record.turn_rows(STEP)],
        "replays": [record.episode_row(STEP, weights) for record in records],
    }


def rollout_groups(bench: Workbench) -> list[TaskGroup]:
    """The tasks with their published episodes without a skill, in playing order."""
    from stages.episodes import episodes_from_tables

    tasks = bench.tasks_of_step(STEP)
    tables = [read_table(bench.run, name, STEP) for name in ("rollouts", "rollout_turns")]
    records = episodes_from_tables(*tables, {task.task_id: task for task in tasks})
    return [(task, [record for record in records if record.job.task == task]) for task in tasks]


def read_figures(run: RunDirectory, condition: str) -> Figures:
    """The figures of one condition's tables, after `estimate-gains`."""
    gains = read_table(run, "gains", STEP)
    scored = gains.filter(gains["replay_gain"].is_valid())
    values = {name: np.asarray(scored[name].to_pylist(), float) for name in scored.column_names if name in _AVERAGED}
    gain = values["replay_gain"]
    tasks = len(gain)
    return Figures(
        condition=condition,
        tasks=tasks,
        replays=int(sum(scored["replays"].to_pylist())),
        student_success=_success(run, "rollouts"),
        teacher_success=_success(run, "replays"),
        student_utility=_mean(values["control_utility"]),
        teacher_utility=_mean(values["replay_utility"]),
        gain=_mean(gain),
        gain_error=float(gain.std(ddof=1)) / math.sqrt(tasks) if tasks > 1 else math.nan,
        shrunk_gain=_mean(values["shrunk_gain"]),
        trust=_mean(values["trust"]),
        trust_above_one=_mean(values["trust"] > 1.0),
    )


_AVERAGED = ("control_utility", "replay_utility", "replay_gain", "shrunk_gain", "trust")


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _success(run: RunDirectory, table: str) -> float:
    return _mean(np.asarray(read_table(run, table, STEP, columns=["won"])["won"].drop_null().to_pylist(), float))


def measure(options: argparse.Namespace, out: Path, reporter: Reporter) -> tuple[list[Figures], float]:
    """Play and estimate all conditions below `out`; their figures, and the slope of trust in the shrunk gain."""
    held_out = HELD_OUT[load_config(options.preset).env.name].format(seed=options.seed, tasks=options.tasks)
    settings = [
        *([f"model.path={options.model}"] if options.model else []),
        f"tasks.train={held_out}",
        f"tasks.per_step={options.tasks}",
        f"rollout.group_size={options.group_size}",
        f"replay.replays={options.replays}",
        f"run.seed={options.seed}",
        *options.set,
    ]
    config = load_config(options.preset, None, settings)
    student = RunDirectory.create(out / "student", config)
    found = []
    with student.lock(), Workbench(student, reporter) as bench:
        rollout.run(student, STEP, force=True, reporter=reporter, bench=bench)
        groups = rollout_groups(bench)
        for condition in EXPECTED:
            target = RunDirectory.create(out / condition, config)
            with target.lock():
                # Gains compare a run's replays with its own rollouts: every condition gets a copy of the same ones.
                shutil.copytree(student.root / "rollouts", target.root / "rollouts", dirs_exist_ok=True)
                play_planted(bench, target, condition, groups, EpisodeProgress(reporter))
                estimate_gains.run(target, STEP, force=True)
            found.append(read_figures(target, condition))
    return found, config.gains.trust_slope


def table_text(figures: Sequence[Figures], verdicts: Sequence[Verdict]) -> str:
    """The table on stdout; utility is u of the method (1 for a win, up to 1.2 for a fast one), trust is omega."""
    lines = [
        f"{'':9}{'':9}{'success':^17}{'utility':^17}{'':>9}{'standard':>10}{'shrunk':>9}{'':>8}{'trust':>8}",
        f"{'skill':9}{'replays':>9}{'student':>9}{'teacher':>8}{'student':>9}{'teacher':>8}{'raw gain':>9}{'error':>10}"
        f"{'gain':>9}{'trust':>8}{'> 1':>8}  as expected",
    ]
    lines += [
        f"{f.condition:9}{f.replays:>9}{f.student_success:>9.1%}{f.teacher_success:>8.1%}{f.student_utility:>9.3f}"
        f"{f.teacher_utility:>8.3f}{f.gain:>+9.3f}{f.gain_error:>10.3f}{f.shrunk_gain:>+9.3f}{f.trust:>8.3f}"
        f"{f.trust_above_one:>8.0%}  {verdict.text}"
        for f, verdict in zip(figures, verdicts, strict=True)
    ]
    return "\n".join(lines)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="HF directory, hub name or bundled:NAME; default: the preset's")
    parser.add_argument("--preset", default="household-tiny", metavar="NAME")
    parser.add_argument("--tasks", type=int, default=48, help="held-out tasks, the types in turn")
    parser.add_argument(
        "--group-size", type=int, default=8, help="G, episodes a task without a skill; half are controls"
    )
    parser.add_argument("--replays", type=int, default=8, help="K, episodes a task in every condition")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tolerance", type=float, default=0.1, help="of the mean trust around 1 for skills of no effect"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the tables there, and go on from what is there")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="set one key of the configuration")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print, and exit with 1 when a condition is not what it should be."""
    options = parse_options()
    reporter = make_reporter(quiet=options.quiet)
    with tempfile.TemporaryDirectory(prefix="planted-skills-") as temporary:
        figures, slope = measure(options, options.out or Path(temporary), reporter)
    verdicts = [judge(entry, trust_slope=slope, tolerance=options.tolerance) for entry in figures]
    if options.json:
        rows = [asdict(entry) | asdict(verdict) for entry, verdict in zip(figures, verdicts, strict=True)]
        facts = {name: getattr(options, name) for name in ("preset", "model", "tasks", "group_size", "replays", "seed")}
        print(json_text(facts | {"conditions": rows}))
    else:
        print(
            f"{options.model or options.preset}: {options.tasks} tasks, G = {options.group_size}, seed {options.seed}"
        )
        print(table_text(figures, verdicts))
    sys.exit(0 if all(verdict.good for verdict in verdicts) else 1)


if __name__ == "__main__":
    sys.exit(guarded(main))
