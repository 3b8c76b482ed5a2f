"""One iteration on two real household games, by a random policy and by the bundled one."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.model_files import resolve_model
from schemas.config import Config
from schemas.config_loading import load_config
from schemas.errors import ConfigError
from schemas.run_directory import RunDirectory
from schemas.table_io import read_table
from stages import loop
from stages.workbench import Workbench

TWO_GAMES = (
    "run.steps=1",
    "run.threads=1",
    "tasks.train=generated:size=small,split=train,seed=1,count=2",
    "tasks.evaluate=generated:size=small,split=valid_seen,seed=2,count=2",
    "tasks.per_step=2",
    "rollout.group_size=2",
    "rollout.groups_per_part=1",
    "replay.replays=2",
    "env.max_turns=6",
)


def two_games(model: str, *more: str) -> Config:
    return load_config("household-tiny", None, [*TWO_GAMES, f"model.path={model}", *more])


def check_iteration(run: RunDirectory) -> None:
    """What holds of any policy: exact restarts, joined rows, a new checkpoint, nothing to do the second time."""
    result = loop.run(run)
    assert result.state == "done"
    rollouts = read_table(run, "rollouts", 1).to_pylist()
    assert len(rollouts) == 4 and all(row["won"] is not None and row["error"] is None for row in rollouts)
    starts = {row["task_id"]: row["fingerprint"] for row in rollouts}
    assert len(starts) == 2 and all(row["fingerprint"] == starts[row["task_id"]] for row in rollouts)
    assert all(row["fingerprint"] == starts[row["task_id"]] for row in read_table(run, "replays", 1).to_pylist())
    assert len(read_table(run, "gains", 1)) == 2
    assert run.finished_steps("checkpoints") == [0, 1]
    assert [row["episodes"] for row in result.summary["evaluations"]] == [2, 2]
    assert loop.run(run).state == "up_to_date"


def test_a_random_policy_plays_and_is_trained_on_two_games(tiny_model_dir: Path, tmp_path: Path) -> None:
    # Its byte-level words need more room than the bundled policy's.
    room = ("prompt.max_reply_tokens=8", "prompt.mode=window", "prompt.history=1", "replay.max_skill_tokens=8")
    check_iteration(RunDirectory.create(tmp_path / "run", two_games(str(tiny_model_dir), *room)))


def test_the_bundled_policy_plays_writes_skills_and_is_trained_on_two_games(tmp_path: Path) -> None:
    try:
        resolve_model("bundled:household-tiny")
    except ConfigError:
        pytest.skip("this checkout has no bundled policy yet")
    run = RunDirectory.create(tmp_path / "run", two_games("bundled:household-tiny"))
    check_iteration(run)
    skills = read_table(run, "skills", 1).to_pylist()
    assert len(skills) == 2 and all(row["source_episode_id"] for row in skills)
    with Workbench(run) as bench:
        assert bench.weights_sha256(0) != bench.weights_sha256(1)
