"""Is learning real? Train with a preset, read the held-out curve from the record, compare first and last checkpoint.

1. `rsipo loop` in a process of its own, begun or continued; its wall-clock time is measured (not with `--skip-training`).
2. The curve from `RUN/evals` and `RUN/timings`: printed, and written to `docs/learning-curve.csv` and `.svg` (preset
   household-tiny; the name of any other preset is added to those of its files).
3. First and last checkpoint, paired task by task: on the run's held-out panel, and elsewhere: on generated full-size games
   and a file of real games, or on questions about an encyclopaedia that no step of the run has searched. Exact McNemar test
   on the tasks that one of the two won and the other did not.

    python benchmarks/learning_curve.py --run runs/learning-curve --steps 100 [--set A.B=C] \\
        [--real ../shared/alfworld/valid_seen.jsonl.xz] [--skip-training]

All evaluations sample at the run's `evaluate.temperature`. Full-size and real games get more turns and a longer context
than small rooms (`FULL_SIZE`), before and after alike; another encyclopaedia comes with its own index. "Minutes" of a checkpoint are those of every stage that came before
it, earlier evaluations included, its own not; generating the panels, loading, and attempts that were killed are in the
wall-clock time alone. Exit code 1 when the held-out success rises by less than 25 points or training took over an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import duckdb
from scipy.stats import binomtest

from benchmarks.curve_svg import CurvePoint, curve_svg
from data.progress import Reporter
from rsipo_cli.console import make_reporter
from rsipo_cli.failures import guarded
from schemas.artifacts import sha256_json
from schemas.config import Config
from schemas.config_loading import load_config, override_config
from schemas.errors import ArtifactError
from schemas.run_directory import RunDirectory
from stages import evaluate
from stages.loop import trained_steps
from stages.panels import EVALUATE, panel_record
from stages.reports import wilson_interval
from stages.workbench import Workbench

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_PRESET = "household-tiny"
FULL_PANEL = "generated:size=full,split=valid_seen,seed=3,count=100"
OTHER_WORLD = "generated:articles=3000,seed=2"
FULL_SIZE = ("env.max_turns=30", "prompt.max_prompt_tokens=2016", "prompt.max_episode_tokens=2048")
REQUIRED_POINTS, REQUIRED_MINUTES = 25.0, 60.0
# By environment: the panel that is compared besides the run's own, and the settings it is played with.
ELSEWHERE: dict[str, tuple[str, tuple[str, ...]]] = {
    "household": (FULL_PANEL, FULL_SIZE),
    "search": (f"{OTHER_WORLD},split=test,count=200", (f"env.options.retriever.index={OTHER_WORLD}",)),
}
DURATIONS = "learning-curve.jsonl"  # in RUN/logs: one line per training process


@dataclass(frozen=True)
class Comparison:
    """First against last checkpoint on the same episodes of one panel."""

    panel: str
    episodes: int
    first_won: int
    last_won: int
    gained: int  # lost by the first, won by the last
    lost: int
    p_value: float


def read_curve(run: RunDirectory) -> list[CurvePoint]:
    """Every finished evaluation of the run, by step; an episode with an environment error counts as not won.

    Raises ArtifactError when there is none.
    """
    steps = run.finished_steps("evals")
    if not steps:
        raise ArtifactError("the run has no evaluation", where=str(run.root), remedy="train without --skip-training")
    source = f"read_parquet('{_glob(run, 'evals')}', hive_partitioning = false)"
    rows = duckdb.sql(
        f"""
        with won as (select step, task_type, coalesce(won, false)::int as won from {source}),
        types as (select step, task_type, count(*) as n, sum(won) as won from won group by all)
        select step, sum(n)::int, sum(won)::int, avg(won / n) from types group by step order by step
        """
    ).fetchall()
    points = []
    for step, episodes, won, macro in rows:
        if step in steps:
            low, high = wilson_interval(won, episodes)
            points.append(CurvePoint(step, minutes_before(run, step), episodes, won, won / episodes, low, high, macro))
    return points


def minutes_before(run: RunDirectory, step: int) -> float | None:
    """Minutes of all stages that led to checkpoint `step`; None when the run has no timings."""
    if not any((run.root / "timings").glob("*/*.parquet")):
        return None
    source = f"read_parquet('{_glob(run, 'timings')}', hive_partitioning = false)"
    row = duckdb.sql(
        f"""
        select coalesce(sum(value), 0.0) / 60 from {source}
        where name = 'total_seconds' and step <= {int(step)} and not (stage = 'evaluate' and step = {int(step)})
        """
    ).fetchall()[0]
    return float(row[0])


def _glob(run: RunDirectory, table: str) -> str:
    return str(run.root / table / "*" / "*.parquet").replace("'", "''")


def outcomes(run: RunDirectory, step: int) -> dict[tuple[str, int], bool]:
    """(task id, attempt) -> won, of one evaluation."""
    folder = str(run.step_dir("evals", step) / "*.parquet").replace("'", "''")
    query = f"select task_id, \"index\", coalesce(won, false) from read_parquet('{folder}', hive_partitioning = false)"
    return {(task_id, index): won for task_id, index, won in duckdb.sql(query).fetchall()}


def compare(panel: str, first: Mapping[tuple[str, int], bool], last: Mapping[tuple[str, int], bool]) -> Comparison:
    """Pair the episodes of two evaluations. Raises ArtifactError when they are not of the same tasks.

    The exact McNemar test is a two-sided binomial test with p = 1/2 of the pairs that differ; 1 when none does.
    """
    if first.keys() != last.keys():
        raise ArtifactError("the two evaluations are of different tasks", where=panel, remedy="evaluate both again")
    gained = sum(last[key] and not first[key] for key in first)
    lost = sum(first[key] and not last[key] for key in first)
    p_value = float(binomtest(gained, gained + lost, 0.5).pvalue) if gained + lost else 1.0
    return Comparison(panel, len(first), sum(first.values()), sum(last.values()), gained, lost, p_value)


def changed_settings(base: Config, config: Config) -> list[str]:
    """The `--set` arguments that turn `base` into `config`, in the order of the keys."""

    def leaves(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in table.items():
            nested = isinstance(value, dict) and bool(value)
            found |= leaves(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
        return found

    old, new = leaves(base.model_dump()), leaves(config.model_dump())
    return [f"{key}={_setting_text(value)}" for key, value in new.items() if key not in old or old[key] != value]


def _setting_text(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def command_line(preset: str, steps: int, settings: Sequence[str]) -> str:
    """The command that makes the curve. Where the run lies and which real games are compared do not change it."""
    words = ["python", "benchmarks/learning_curve.py", "--preset", preset, "--steps", str(steps)]
    for setting in settings:
        words += ["--set", setting]
    return shlex.join(words)


def curve_csv(points: Sequence[CurvePoint], comments: Sequence[str]) -> str:
    """The curve as CSV below its comments; shares with four digits, minutes with two, empty where unknown."""
    lines = [f"# {comment}" for comment in comments]
    lines.append("step,minutes,episodes,won,success,wilson_low,wilson_high,macro_success")
    for p in points:
        minutes = "" if p.minutes is None else f"{p.minutes:.2f}"
        lines.append(f"{p.step},{minutes},{p.episodes},{p.won},{p.success:.4f},{p.low:.4f},{p.high:.4f},{p.macro:.4f}")
    return "\n".join(lines) + "\n"


def curve_text(points: Sequence[CurvePoint]) -> str:
    """The curve as a table on the screen."""
    lines = [f"{'step':>5}{'minutes':>9}{'won':>10}{'success':>10}   {'95 % interval':<17}{'by type':>8}"]
    for p in points:
        minutes = "-" if p.minutes is None else f"{p.minutes:.1f}"
        interval = f"[{p.low:.1%}, {p.high:.1%}]"
        lines.append(
            f"{p.step:>5}{minutes:>9}{f'{p.won}/{p.episodes}':>10}{p.success:>10.1%}   {interval:<17}{p.macro:>8.1%}"
        )
    return "\n".join(lines)


def comparison_text(comparisons: Sequence[Comparison], first: int, last: int) -> str:
    """First and last checkpoint on every panel."""
    lines = [f"checkpoint {first} against checkpoint {last}, the same tasks and seeds, no skill in context"]
    for c in comparisons:
        lines.append(f"  {c.panel}")
        for step, won in ((first, c.first_won), (last, c.last_won)):
            low, high = wilson_interval(won, c.episodes)
            rate = f"{won}/{c.episodes} = {won / c.episodes:.1%}"
            lines.append(f"    step {step:<5}{rate:<18}95 % interval [{low:.1%}, {high:.1%}]")
        points = 100 * (c.last_won - c.first_won) / c.episodes
        lines.append(
            f"    {points:+.1f} points: {c.gained} tasks gained, {c.lost} lost, exact McNemar p = {c.p_value:.2g}"
        )
    return "\n".join(lines)


def judge(points: Sequence[CurvePoint], wall_minutes: float | None) -> tuple[bool, str]:
    """Whether the held-out success rose enough in time; `wall_minutes` is the wall-clock time, if it was measured."""
    rise = 100 * (points[-1].success - points[0].success)
    minutes = wall_minutes if wall_minutes is not None else points[-1].minutes
    good = rise >= REQUIRED_POINTS and minutes is not None and minutes <= REQUIRED_MINUTES
    spent = "an unknown time" if minutes is None else f"{minutes:.1f} minutes"
    wanted = f"required: {REQUIRED_POINTS:g} points within {REQUIRED_MINUTES:g} minutes"
    return good, f"{rise:+.1f} points in {spent} ({wanted}): {'yes' if good else 'NO'}"


def train(options: argparse.Namespace) -> None:
    """Begin or continue `rsipo loop`; ends the program with its exit code when it fails."""
    command = [sys.executable, "-m", "rsipo_cli", "loop", "--run", str(options.run), "--steps", str(options.steps)]
    command += ["--preset", options.preset]
    for setting in options.set:
        command += ["--set", setting]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    before = trained_steps(RunDirectory.open(options.run)) if RunDirectory.exists(options.run) else 0
    started = time.monotonic()
    # The loop's own closing table goes to stderr, so that stdout holds this script's report alone.
    code = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, stdout=sys.stderr, check=False
    ).returncode
    if code:
        sys.exit(code if code > 0 else 128 - code)
    run = RunDirectory.open(options.run)
    facts = {"from": before, "to": trained_steps(run), "seconds": round(time.monotonic() - started, 1)}
    if facts["to"] > before:
        durations = run.log_path.parent / DURATIONS
        durations.parent.mkdir(exist_ok=True)
        with open(durations, "a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


def wall_clock_minutes(run: RunDirectory, last: int) -> float | None:
    """Minutes of the training processes from step 0 to `last`; None when some of them were not measured to their end."""
    path, reached, seconds = run.log_path.parent / DURATIONS, 0, 0.0
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        facts = json.loads(line)
        if facts["from"] != reached:
            return None
        reached, seconds = facts["to"], seconds + facts["seconds"]
    return seconds / 60 if reached == last else None


def evaluate_elsewhere(
    run: RunDirectory, panel: str, settings: Sequence[str], steps: Sequence[int], reporter: Reporter
) -> Comparison:
    """Both checkpoints on another panel, in a directory beside the run; what is there and unchanged is not repeated."""
    config = override_config(run.config, settings)
    out = run.root.with_name(f"{run.root.name}-{sha256_json([panel, *settings])[:8]}")
    for step in steps:
        reporter.note(f"checkpoint {step} on {panel}")
        evaluate.run(run, step, out=out, config=config, panel=panel, reporter=reporter, force=True)
    target = RunDirectory.open(out)
    return compare(panel, *(outcomes(target, step) for step in steps))


def publish(points: Sequence[CurvePoint], run: RunDirectory, options: argparse.Namespace, wall: float | None) -> None:
    """Write the CSV and the SVG."""
    last = trained_steps(run)
    command = command_line(options.preset, last, changed_settings(load_config(options.preset), run.config))
    panel, bench = panel_record(run, EVALUATE), Workbench(run)
    weights = f"checkpoint 0 {bench.weights_sha256(0)[:12]}, checkpoint {last} {bench.weights_sha256(last)[:12]}"
    spent = "unknown" if wall is None else f"{wall:.1f} minutes"
    comments = [
        command,
        f"panel {panel['source']}, sha256 {panel['sha256'][:12]}; temperature {run.config.evaluate.temperature:g}",
        f"weights: {weights}; wall-clock time of the training with its evaluations: {spent}",
    ]
    options.docs.mkdir(parents=True, exist_ok=True)
    name = "learning-curve" if options.preset == DEFAULT_PRESET else f"learning-curve-{options.preset}"
    (options.docs / f"{name}.csv").write_text(curve_csv(points, comments), encoding="utf-8")
    what = {"household": "games", "search": "questions"}.get(run.config.env.name, "tasks")
    title = f"Success on {panel['tasks']} held-out {what}, preset {options.preset}"
    subtitle = f"{panel['source']}, no skill in context, temperature {run.config.evaluate.temperature:g}"
    (options.docs / f"{name}.svg").write_text(curve_svg(points, title, subtitle), encoding="utf-8")


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/learning-curve"), metavar="DIR")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--preset", default=DEFAULT_PRESET, metavar="NAME")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="passed on to rsipo loop")
    parser.add_argument("--skip-training", action="store_true", help="only report on what the run holds")
    parser.add_argument("--real", metavar="FILE", help="household: panel of real games; not compared when not given")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", metavar="DIR", help="where the curve is written")
    parser.add_argument("--quiet", action="store_true", help="no progress of the comparisons on stderr")
    return parser.parse_args(arguments)


def main() -> None:
    """Train, report, compare; exit with 1 when the held-out success did not rise enough in time."""
    options = parse_options()
    reporter = make_reporter(quiet=options.quiet)
    if not options.skip_training:
        train(options)
    run = RunDirectory.open(options.run)
    last = trained_steps(run)
    if last == 0:
        raise ArtifactError("the run has no trained step", where=str(run.root), remedy="train without --skip-training")
    for step in (0, last):
        if step not in run.finished_steps("evals"):
            evaluate.run(run, step, reporter=reporter)
    points, wall = read_curve(run), wall_clock_minutes(run, last)
    publish(points, run, options, wall)
    print(curve_text(points), flush=True)
    good, verdict = judge(points, wall)
    print(f"{'wall-clock time' if wall is not None else 'time of the stages'}: {verdict}\n", flush=True)
    found = [compare(panel_record(run, EVALUATE)["source"], outcomes(run, 0), outcomes(run, last))]
    panels = [ELSEWHERE[run.config.env.name]] if run.config.env.name in ELSEWHERE else []
    panels += [(options.real, FULL_SIZE)] if options.real else []
    found += [evaluate_elsewhere(run, panel, settings, (0, last), reporter) for panel, settings in panels]
    print(comparison_text(found, 0, last))
    if run.config.env.name == "household" and not options.real:
        print("  real games: not compared, no file given (--real FILE)")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    sys.exit(guarded(main))
