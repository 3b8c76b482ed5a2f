"""The stage train-step on a small world: what it publishes, what it refuses, and how it resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from data.model_files import weights_sha256
from schemas.artifacts import read_manifest
from schemas.errors import ArtifactError, EngineError, NumericsError, RsipoError
from schemas.run_directory import RunDirectory
from schemas.table_io import finish_step, read_table, write_part
from stages import estimate_gains, replay, rollout, train_step
from stages.batch_file import load_batch
from stages.learner import objective_of
from stages.workbench import Workbench
from tests.small_world import small_config, write_small_policy

BEFORE = (rollout, replay, estimate_gains)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first step is ready to be trained; copy it."""
    root = tmp_path_factory.mktemp("played")
    run = RunDirectory.create(root / "run", small_config(write_small_policy(root / "policy")))
    with run.lock(), Workbench(run) as bench:
        for stage in BEFORE:
            stage.run(run, 1, bench=bench)
    return run.root


@pytest.fixture
def run(played: Path, tmp_path: Path) -> RunDirectory:
    return RunDirectory.open(shutil.copytree(played, tmp_path / "run"))


def changed(run: RunDirectory, **sections: dict) -> RunDirectory:
    """The run as if it had been started with other settings of the update."""
    config = run.config
    for name, values in sections.items():
        config = config.model_copy(update={name: getattr(config, name).model_copy(update=values)})
    return RunDirectory(run.root, config)


def rewrite(run: RunDirectory, table: str, **columns: object) -> None:
    """Replace columns of a published table by a constant, as a broken upstream would have written it."""
    rows = [row | columns for row in read_table(run, table, 1).to_pylist()]
    manifest = read_manifest(run.step_dir(table, 1))
    write_part(run, 1, 0, {table: rows}, "other")
    for path in run.step_dir(table, 1).glob("part-*.parquet"):
        if path.name != "part-00000.parquet":
            path.unlink()
    finish_step(run, [table], 1, kind=manifest.kind, inputs=manifest.inputs, extra=manifest.extra)


def files(run: RunDirectory) -> dict[str, bytes]:
    """Everything that training publishes."""
    folders = [run.root / name for name in ("train_rows", "train_metrics", "checkpoints")]
    return {
        str(path.relative_to(run.root)): path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_step_publishes_rows_metrics_and_a_checkpoint_that_name_each_other(run: RunDirectory) -> None:
    result = train_step.run(run, 1)
    assert result.state == "done" and result.summary["grad_norm"] > 0
    checkpoint = read_manifest(run.checkpoint_dir(1))
    assert checkpoint.extra["weights_sha256"] == weights_sha256(run.checkpoint_dir(1) / "model")
    facts = read_manifest(run.step_dir("train_metrics", 1)).extra
    assert facts["weights_sha256"] == checkpoint.extra["weights_sha256"]
    assert facts["checkpoint_sha256"] == checkpoint.sha256
    assert checkpoint.extra["weights_sha256"] != read_manifest(run.checkpoint_dir(0)).extra["weights_sha256"]
    metrics = {row["name"]: row["value"] for row in read_table(run, "train_metrics", 1).to_pylist()}
    rows = read_table(run, "train_rows", 1).to_pylist()
    assert metrics["tokens"] == sum(row["loss_tokens"] for row in rows) == metrics["mismatch/tokens"]
    assert metrics["rows/rollout"] == sum(row["kind"] == "rollout" for row in rows) == 16
    assert metrics["mismatch/max"] < 1e-4
    assert metrics["policy/tokens"] + metrics["skill/tokens"] == metrics["tokens"]
    for row in rows:
        assert len(row["trainer_logprobs"]) == row["loss_tokens"]
        assert (row["advantage"] is None) == (row["kind"] == "skill") == (row["episode_id"] is None)
    assert any(row["teacher_logprobs"] for row in rows)
    assert json.loads((run.checkpoint_dir(1) / "optimizer" / "state.json").read_text())["updates"] == 1
    assert train_step.run(run, 1).state == "up_to_date"


def test_a_step_that_lost_its_last_mark_is_made_again_byte_for_byte(run: RunDirectory) -> None:
    train_step.run(run, 1)
    whole = files(run)
    (run.step_dir("train_metrics", 1) / "manifest.json").unlink()
    assert train_step.run(run, 1).state == "done"
    assert files(run) == whole
    shutil.rmtree(run.checkpoint_dir(1))
    assert train_step.run(run, 1).state == "done"
    assert files(run) == whole


def test_a_bench_that_keeps_the_learner_gives_the_bytes_of_separate_processes(
    run: RunDirectory, tmp_path: Path
) -> None:
    other = RunDirectory.open(shutil.copytree(run.root, tmp_path / "other"))
    with run.lock(), Workbench(run) as bench:
        train_step.run(run, 1, bench=bench)
        for stage in (*BEFORE, train_step):
            stage.run(run, 2, bench=bench)
    train_step.run(other, 1)
    for stage in (*BEFORE, train_step):
        stage.run(other, 2)
    assert files(run) == files(other)


def test_tables_made_with_other_weights_are_refused(run: RunDirectory) -> None:
    rewrite(run, "replays", weights_sha256="0" * 64)
    with pytest.raises(ArtifactError, match=r"other weights.*replays.*rsipo replay"):
        train_step.run(run, 1)
    assert not run.checkpoint_dir(1).exists() and not run.step_dir("train_metrics", 1).exists()


def test_a_changed_setting_makes_the_step_stale_and_force_makes_it_again(run: RunDirectory) -> None:
    train_step.run(run, 1)
    other = changed(run, optimizer={"lr": 5e-4})
    with pytest.raises(ArtifactError, match="stale.*config"):
        train_step.run(other, 1)
    before = read_manifest(run.checkpoint_dir(1)).sha256
    assert train_step.run(other, 1, force=True).state == "done"
    assert read_manifest(run.checkpoint_dir(1)).sha256 != before


def test_a_gap_to_the_engine_stops_the_step_and_keeps_the_batch(run: RunDirectory) -> None:
    strict = changed(run, engine={"max_logprob_gap": 1e-12})
    with pytest.raises(EngineError, match="the batch is kept in .*failed"):
        train_step.run(strict, 1)
    batch = load_batch(run.step_dir("failed", 1) / "batch.safetensors")
    assert len(batch.rows) >= 16 and not run.checkpoint_dir(1).exists()
    assert train_step.run(run, 1).state == "done"  # nothing of the failure stands in the way


def test_without_usable_skills_the_other_losses_go_on_and_the_record_says_so(run: RunDirectory) -> None:
    rewrite(run, "skills", skill=None)
    rewrite(run, "gains", skill_reward=None, trust=1.0)
    train_step.run(run, 1)
    metrics = {row["name"]: row["value"] for row in read_table(run, "train_metrics", 1).to_pylist()}
    assert metrics["opsd/unrealised"] == metrics["skill/unrealised"] == 1 and metrics["policy/unrealised"] == 0
    assert metrics["opsd/tasks_no_skill"] == 4 and metrics["skill/unchecked"] == metrics["skill/written"] > 0


def test_a_loss_that_reaches_nothing_although_it_could_fails_and_so_does_a_step_without_any() -> None:
    from schemas.config import ObjectiveSection

    objective = objective_of(ObjectiveSection())
    reached = {f"{name}/tokens": 5.0 for name in objective.enabled}
    assert set(train_step.check_targets(reached, objective, {}).values()) == {0.0}
    with pytest.raises(NumericsError, match="opsd loss is enabled and reaches no token"):
        train_step.check_targets({**reached, "opsd/tokens": 0.0}, objective, {"opsd": True})
    found = train_step.check_targets({**reached, "opsd/tokens": 0.0}, objective, {"opsd": False})
    assert found["opsd/unrealised"] == 1.0
    alone = objective_of(ObjectiveSection(grpo_coef=0.0, skill_coef=0.0))
    with pytest.raises(NumericsError, match="no enabled loss"):
        train_step.check_targets({"kl/tokens": 5.0}, alone, {"opsd": False})


def test_without_skills_in_the_objective_only_rollouts_are_read(run: RunDirectory) -> None:
    for table in ("skills", "replays", "replay_turns", "gains", "type_stats"):
        shutil.rmtree(run.root / table)
    grpo = changed(run, objective={"opsd_coef": 0.0, "skill_coef": 0.0, "kl_coef": 0.0})
    assert train_step.run(grpo, 1).state == "done"
    names = set(read_table(run, "train_metrics", 1)["name"].to_pylist())
    assert "policy/loss" in names and not any(name.startswith(("opsd/", "skill/", "kl/")) for name in names)


def test_missing_rollouts_are_named_with_their_command(run: RunDirectory) -> None:
    shutil.rmtree(run.root / "rollouts")
    with pytest.raises(RsipoError, match="rollouts"):
        train_step.run(run, 1)


def test_rows_join_the_other_tables_by_their_ids(run: RunDirectory) -> None:
    train_step.run(run, 1)
    rows = read_table(run, "train_rows", 1)
    episodes = set(read_table(run, "rollouts", 1)["episode_id"].to_pylist())
    skills = set(read_table(run, "skills", 1)["skill_id"].to_pylist())
    assert set(pa.compute.drop_null(rows["episode_id"]).to_pylist()) <= episodes
    assert set(pa.compute.drop_null(rows["skill_id"]).to_pylist()) <= skills
