"""Stage `loop`: the iteration repeated (method section 1), with evaluations on the run's fixed panel in between.

The loop holds no state of its own. It walks through the steps in order and lets every stage decide from the record whether
work is owed; so it resumes at any point, after the first step as after the last, and a run that is complete is "up to
date". A stage whose inputs changed is stale: the loop rebuilds it and everything after it. One exception: in steps that are
already trained, a change of the code or of the environment's version alone is noted and not acted upon, since an upgrade
must not throw away a training.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from data.progress import Reporter, SilentReporter
from schemas.artifacts import MANIFEST, read_manifest
from schemas.config import Config
from schemas.errors import ArtifactError, ConfigError, RsipoError
from schemas.run_directory import RunDirectory
from stages import estimate_gains, evaluate, replay, rollout
from stages.panels import TRAIN
from stages.stage import StageResult
from stages.trackers import Trackers
from stages.workbench import ENVIRONMENT, Workbench, bench_of

STAGE = "loop"
# Inputs whose change an upgrade brings with it.
UPGRADES = frozenset({"code", ENVIRONMENT})

# Figures of a finished stage on its line, where its summary has them, and how they are written.
NOTED = {
    "success": ".1%",
    "wilson_low": ".1%",
    "wilson_high": ".1%",
    "mean_turns": ".1f",
    "invalid_share": ".1%",
    "skills": "d",
    "fingerprint_mismatches": "d",
    "mean_gain": "+.3f",
    "mean_trust": ".3f",
    "loss": ".4f",
    "grad_norm": ".3f",
}


@dataclass(frozen=True)
class StageEntry:
    """One stage of the iteration: its module, and the table whose manifest says that a step of it is complete."""

    name: str
    module: ModuleType
    table: str


def iteration(config: Config) -> list[StageEntry]:
    """The stages of one iteration, in order. Without distillation and skill loss nothing needs skills or replays."""
    from stages import train_step

    entries = [StageEntry(rollout.STAGE, rollout, "rollouts")]
    if needs_replays(config):
        entries.append(StageEntry(replay.STAGE, replay, "replays"))
        entries.append(StageEntry(estimate_gains.STAGE, estimate_gains, "gains"))
    entries.append(StageEntry(train_step.STAGE, train_step, train_step.TABLES[-1]))
    return entries


def needs_replays(config: Config) -> bool:
    """Whether any term of the objective uses skills; ConfigError for an objective that cannot be built."""
    from stages.learner import objective_of

    objective = objective_of(config.objective)
    return objective.needs_teacher or objective.needs_skill_rows


def evaluation_due(config: Config, step: int, last: int) -> bool:
    """Whether checkpoint `step` is evaluated: before the first step, every n-th, and after the last; never for n = 0.

    >>> [step for step in range(8) if evaluation_due(Config(), step, 7)]  # evaluate.every is 10
    [0, 7]
    """
    every = config.evaluate.every
    return every > 0 and (step % every == 0 or step == last)


def trained_steps(run: RunDirectory) -> int:
    """The number of steps from the first on that have been trained without a gap."""
    done, count = set(run.finished_steps("train_metrics")), 0
    while count + 1 in done:
        count += 1
    return count


def run(
    run: RunDirectory,
    steps: int | None = None,
    *,
    force: bool = False,
    reporter: Reporter | None = None,
    bench: Workbench | None = None,
) -> StageResult:
    """Bring the run to `steps` iterations (default `run.steps`); whatever is already there and valid is not repeated.

    `force` also rebuilds trained steps that other code, or another version of the environment, made. The result's state is `up_to_date` only when every step was
    complete; its summary holds one entry per step and evaluation, and the command to run next. Raises what the stages raise.
    """
    reporter = reporter or SilentReporter()
    total = run.config.run.steps if steps is None else steps
    if total < 1:
        raise ConfigError("a loop needs steps", where="--steps", expected=">= 1", found=total)
    with run.lock(), bench_of(run, bench, reporter) as workbench:
        trackers = Trackers(run.config.run.trackers, reporter)
        walk = _Walk(run, total, force, reporter, workbench, trackers)
        walk.announce()
        # What is configured wrongly is found before anything is made: an evaluation comes first and needs no training panel.
        _ = workbench.environment_version, workbench.panel_sha256(TRAIN)
        trackers.start(run.root, run.config.model_dump(mode="json"))
        try:
            walk.evaluate(0)
            for step in range(1, total + 1):
                walk.iterate(step)
                walk.evaluate(step)
        finally:
            trackers.finish()
        return walk.result()


@dataclass
class _Walk:
    """One pass over the steps of a run."""

    run: RunDirectory
    total: int
    force: bool
    reporter: Reporter
    bench: Workbench
    trackers: Trackers
    worked: int = 0  # stages that did something
    rows: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    trained_before: int = 0
    seconds: list[float] = field(default_factory=list)  # of the steps worked on in this walk

    def announce(self) -> None:
        """Say where the run stands before anything is loaded: the bar starts at the steps that are done."""
        self.trained_before = min(trained_steps(self.run), self.total)
        self._show_progress(self.trained_before)
        if self.trained_before:
            weights = self.bench.weights_sha256(self.trained_before)
            self.reporter.note(f"resumed from step {self.trained_before} (sha {weights[:12]})")
        else:
            self.reporter.note(f"starting at step 1 of {self.total}")

    def iterate(self, step: int) -> None:
        """All stages of one step."""
        started = time.perf_counter()
        results = {entry.name: self._stage(entry, step) for entry in iteration(self.run.config)}
        row = {"step": step, **_step_figures({name: result.summary for name, result in results.items()})}
        if any(result.state == "done" for result in results.values()):
            row["seconds"] = round(time.perf_counter() - started, 1)
            self.seconds.append(row["seconds"])
            figures = {name: value for name, value in row.items() if name != "step"}
            self._show_progress(step, **figures, **self._time_left(step))
        self.rows.append(row)

    def evaluate(self, step: int) -> None:
        """The evaluation of checkpoint `step`, where one is due."""
        if not evaluation_due(self.run.config, step, self.total):
            return
        result = self._stage(StageEntry(evaluate.STAGE, evaluate, "evals"), step)
        names = ("success", "wilson_low", "wilson_high", "macro_success", "won", "episodes", "env_errors")
        self.evaluations.append({"step": step} | {name: result.summary.get(name) for name in names})

    def _show_progress(self, step: int, **figures: object) -> None:
        self.reporter.stage(STAGE, self.total, "steps")
        self.reporter.advance(step, **figures)
        self.reporter.done()

    def _time_left(self, step: int) -> dict[str, str]:
        left = (self.total - step) * sum(self.seconds) / len(self.seconds)
        return {"left": f"{left / 60:.1f} min"} if step < self.total else {}

    def _stage(self, entry: StageEntry, step: int) -> StageResult:
        trained = step <= self.trained_before
        changed = self._changed_inputs(entry, step)
        if trained and changed and changed <= UPGRADES and not self.force:
            self.kept.add(step)
            return StageResult(entry.name, step, "up_to_date", dict(entry.module.summarise(self.run, step)))
        needed = step if entry.module is evaluate else step - 1
        if trained and not self._has_weights(needed):
            return self._as_it_is(entry, step, needed)
        if changed:
            self.reporter.note(f"step {step} {entry.name}: {', '.join(sorted(changed))} changed, made again")
        started = time.perf_counter()
        # Force means: what is stale or damaged is rebuilt. It never repeats what is complete and unchanged.
        result = entry.module.run(self.run, step, force=True, reporter=self.reporter, bench=self.bench)
        if result.state == "done":
            self.worked += 1
            self._note(entry.name, step, result.summary, time.perf_counter() - started)
            self.trackers.log(step, entry.name, result.summary)
        return result

    def _has_weights(self, step: int) -> bool:
        return (self.run.checkpoint_dir(step) / MANIFEST).is_file() or step == 0

    def _as_it_is(self, entry: StageEntry, step: int, needed: int) -> StageResult:
        """A stage of a trained step whose weights retention has removed: a fault in it is told, and stops no training."""
        try:
            return entry.module.run(self.run, step, force=False, reporter=self.reporter, bench=self.bench)
        except ArtifactError as error:
            self.reporter.note(f"step {step} {entry.name} cannot be made again without checkpoint {needed}: {error}")
            return StageResult(entry.name, step, "up_to_date", {})

    def _note(self, stage: str, step: int, summary: dict[str, Any], seconds: float) -> None:
        figures = [
            f"{name.replace('_', ' ')} {summary[name]:{style}}"
            for name, style in NOTED.items()
            if name in summary and summary[name] is not None
        ]
        figures.append(f"{seconds:.1f} s")
        if summary.get("sampled_tokens"):
            figures.append(f"{summary['sampled_tokens'] / seconds:,.0f} tokens/s")
        self.reporter.note(f"step {step}/{self.total} {stage}: {', '.join(figures)}")

    def _changed_inputs(self, entry: StageEntry, step: int) -> set[str]:
        """Names of the inputs in which a finished stage differs from what would be made now; empty if it is not finished."""
        directory = self.run.step_dir(entry.table, step)
        if not (directory / MANIFEST).is_file():
            return set()
        try:
            recorded = read_manifest(directory, verify=False).inputs
            present: dict[str, str] = entry.module.stage_inputs(self.run, step, self.bench)
        except ArtifactError:
            return set()  # damaged, or something before it is: the stage itself finds out
        changed = {name for name in {*recorded, *present} if recorded.get(name) != present.get(name)}
        # What other code did not name is a difference of the code, and says nothing of the input.
        return changed & recorded.keys() if "code" in changed else changed

    def result(self) -> StageResult:
        """The closing table's figures. Raises RsipoError when the walk ended and the run is not complete."""
        trained = trained_steps(self.run)
        if trained < self.total:
            raise RsipoError(
                "the loop ended before the run was complete",
                where=str(self.run.root),
                expected=f"{self.total} trained steps",
                found=trained,
            )
        if self.kept:
            self.reporter.note(
                f"steps {_ranges(self.kept)} were made by another version of the code or the environment and kept; --force makes them again"
            )
        summary: dict[str, Any] = {
            "steps": self.rows,
            "evaluations": self.evaluations,
            "checkpoint": str(self.run.checkpoint_dir(self.total)),
            "next_command": self._next_command(),
        }
        if self.kept:
            summary["kept_steps"] = _ranges(self.kept)
        return StageResult(STAGE, self.total, "done" if self.worked else "up_to_date", summary)

    def _next_command(self) -> str:
        if self.evaluations:
            return f"rsipo loop --run {self.run.root} --steps {2 * self.total}"
        return f"rsipo evaluate --run {self.run.root} --step {self.total}"


def _step_figures(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The few figures of a step that its row in the closing table shows."""
    chosen = {
        "success": (rollout.STAGE, "success"),
        "teacher_success": (replay.STAGE, "success"),
        "skills": (replay.STAGE, "skills"),
        "mean_gain": (estimate_gains.STAGE, "mean_gain"),
        "mean_trust": (estimate_gains.STAGE, "mean_trust"),
        "loss": ("train-step", "loss"),
    }
    return {name: summaries[stage].get(figure) for name, (stage, figure) in chosen.items() if stage in summaries}


def _ranges(numbers: set[int]) -> str:
    """Numbers as ranges.

    >>> _ranges({1, 2, 3, 7})
    '1-3, 7'
    """
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
