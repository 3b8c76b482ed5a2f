"""The bundled search policy is a real policy: it searches, and its success follows the plan that a skill tells."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from data.search.demonstrator import bad_plans, good_plan
from data.search.skill_texts import skill_text
from data.seeds import derive_seed
from data.tasks import Task
from schemas.config_loading import load_config
from schemas.run_directory import RunDirectory
from schemas.table_io import read_table
from stages import loop
from stages.episode_records import EpisodeRecord
from stages.episodes import EpisodeJob, play
from stages.workbench import Workbench

WORLD = "generated:articles=600,seed=2"  # neither the preset's world nor one of the training text
QUESTIONS = 32


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    settings = [
        "run.steps=1",
        "run.threads=1",
        f"env.options.retriever.index={WORLD}",
        f"tasks.train={WORLD},split=test,count={QUESTIONS}",
        f"tasks.evaluate={WORLD},split=test,count=4,draw=1",
        "tasks.per_step=8",
        "rollout.group_size=4",
        "replay.replays=2",
    ]
    run = RunDirectory.create(tmp_path_factory.mktemp("search") / "run", load_config("search-tiny", None, settings))
    with Workbench(run) as bench:
        yield bench


def played(bench: Workbench, skill: Callable[[Task], str | None]) -> list[EpisodeRecord]:
    jobs = [
        EpisodeJob(task, 0, derive_seed(0, task.task_id), skill(task), None, task.task_id)
        for task in bench.panel("train")
    ]
    return play(bench.engine(0), bench.environment, bench.renderer(0), jobs, limits=bench.limits, temperature=1.0)


def wins(records: list[EpisodeRecord]) -> int:
    return sum(bool(record.won) for record in records)


def test_success_follows_the_plan_that_the_skill_tells(bench: Workbench) -> None:
    rng = random.Random(0)
    good = wins(played(bench, lambda task: skill_text(good_plan(task.task_type), rng)))
    bad = wins(played(bench, lambda task: skill_text(rng.choice(bad_plans(task.task_type)), rng)))
    alone = wins(played(bench, lambda task: None))
    assert good >= 0.75 * QUESTIONS
    assert bad <= 0.2 * QUESTIONS
    assert bad < alone < good


def test_its_replies_can_be_read(bench: Workbench) -> None:
    turns = [turn for record in played(bench, lambda task: None) for turn in record.turns]
    assert sum(turn.valid for turn in turns) >= 0.95 * len(turns)


def test_it_is_trained_on_its_own_checked_skills(bench: Workbench) -> None:
    """One iteration: exact restarts, a skill for every question, new weights."""
    run = bench.run
    assert loop.run(run, bench=bench).state == "done"
    starts = {row["task_id"]: row["fingerprint"] for row in read_table(run, "rollouts", 1).to_pylist()}
    replays = read_table(run, "replays", 1).to_pylist()
    assert len(starts) == 8 and replays
    assert all(row["fingerprint"] == starts[row["task_id"]] and row["error"] is None for row in replays)
    skills = [row["skill"] for row in read_table(run, "skills", 1).to_pylist()]
    assert len(skills) == 8 and sum(skill is not None for skill in skills) >= 6
    assert bench.weights_sha256(0) != bench.weights_sha256(1)
