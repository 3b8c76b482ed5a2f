"""`sft-skills` on the small world: it learns, resumes, repeats nothing, and never replaces a checkpoint by accident."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data.model_files import weights_sha256
from data.progress import SilentReporter
from schemas.artifacts import read_manifest
from schemas.errors import ArtifactError, ConfigError
from schemas.run_directory import RunDirectory
from stages import rollout, sft_skills
from stages.learner import Learner
from stages.workbench import Workbench
from tests.small_world import small_config, write_small_policy


class Notes(SilentReporter):
    """Remembers what would stay on screen."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_policy(tmp_path_factory.mktemp("policy"))


def write_lines(path: Path, skills: int = 5) -> Path:
    lines: list[object] = [
        {"prompt": f"write task n{n} yes see n{n}", "response": f"summary: n9 skill: n{n % skills} n2 n3 n4 n5 n6"}
        for n in range(20)
    ]
    lines.insert(3, {"prompt": "x"})
    path.write_text("\n".join(map(json.dumps, lines)) + "\nnot json\n")
    return path


def started(policy: Path, root: Path) -> RunDirectory:
    settings = {"sft__epochs": 2, "sft__lr": 1e-2, "sft__batch_rows": 4, "sft__held_out": 0.2}
    return RunDirectory.create(root, small_config(policy, engine__name="transformers", **settings))


@pytest.fixture(scope="module")
def trained(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, Path, dict]:
    root = tmp_path_factory.mktemp("sft")
    lines, run = write_lines(root / "lines.jsonl"), started(policy, root / "run")
    return run, lines, sft_skills.run(run, lines).summary


def test_it_learns_reports_and_leaves_checkpoint_zero_alone(
    trained: tuple[RunDirectory, Path, dict], policy: Path
) -> None:
    run, _, summary = trained
    assert summary["held_out_loss_after"] < summary["held_out_loss_before"] - 1
    assert (summary["accepted"], summary["rejected"]) == (20, 2)
    assert [row["line"] for row in summary["rejected_lines"]] == [4, 22]
    assert summary["training_examples"] + summary["held_out_examples"] == 20
    assert 0 <= summary["parse_share_before"] <= 1 and 0 <= summary["parse_share_after"] <= 1
    manifest = read_manifest(run.checkpoint_dir(0))
    model = run.checkpoint_dir(0) / "model"
    assert manifest.extra["weights_sha256"] == weights_sha256(model) != weights_sha256(policy)
    assert not (run.root / "sft").exists()
    assert len((run.root / "logs" / "sft-rejected.jsonl").read_text().splitlines()) == 2


def test_the_same_command_again_is_up_to_date(trained: tuple[RunDirectory, Path, dict]) -> None:
    run, lines, summary = trained
    before = read_manifest(run.checkpoint_dir(0)).sha256
    again = sft_skills.run(run, lines)
    assert again.state == "up_to_date" and again.summary == summary
    assert read_manifest(run.checkpoint_dir(0)).sha256 == before


@pytest.fixture
def interrupted(policy: Path, trained: tuple[RunDirectory, Path, dict], tmp_path: Path) -> RunDirectory:
    """A run whose training was stopped in its second epoch."""
    run, epoch = started(policy, tmp_path / "run"), sft_skills._Training._epoch

    def stopped(self: sft_skills._Training, learner: Learner, number: int, per_epoch: int) -> None:
        if number == 2:
            raise KeyboardInterrupt
        epoch(self, learner, number, per_epoch)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sft_skills._Training, "_epoch", stopped)
        sft_skills.run(run, trained[1])
    assert not run.checkpoint_dir(0).exists() and (run.root / "sft" / "epoch=001").is_dir()
    return run


def test_an_interrupted_training_resumes_after_its_last_epoch_to_the_same_weights(
    trained: tuple[RunDirectory, Path, dict], interrupted: RunDirectory
) -> None:
    finished, lines, summary = trained
    notes = Notes()
    resumed = sft_skills.run(interrupted, lines, reporter=notes).summary
    assert "resumed after epoch 1 of 2" in notes.lines
    assert {**resumed, "next_command": ""} == {**summary, "next_command": ""}
    assert read_manifest(interrupted.checkpoint_dir(0)).files == read_manifest(finished.checkpoint_dir(0)).files


@pytest.mark.parametrize("name", ["epoch=001/model/model.safetensors", "epoch=001/optimizer/exp_avg.safetensors"])
@pytest.mark.parametrize("flipped", [True, False])
def test_work_in_progress_that_is_damaged_is_made_again(
    trained: tuple[RunDirectory, Path, dict], interrupted: RunDirectory, name: str, flipped: bool
) -> None:
    finished, lines, _ = trained
    path = interrupted.root / "sft" / name
    content = bytearray(path.read_bytes())
    content[-2] ^= 1  # the last mantissa bits of a number: it stays finite
    path.write_bytes(content if flipped else content[:-2])
    sft_skills.run(interrupted, lines)
    assert read_manifest(interrupted.checkpoint_dir(0)).files == read_manifest(finished.checkpoint_dir(0)).files


def test_an_unfinished_fine_tuning_is_not_passed_over_by_the_next_stage(interrupted: RunDirectory) -> None:
    with pytest.raises(ArtifactError, match=r"sft-skills.*not ended.*same rsipo sft-skills command"):
        rollout.run(interrupted, 1)
    assert not interrupted.checkpoint_dir(0).exists()
    shutil.rmtree(interrupted.root / "sft")
    assert rollout.run(interrupted, 1).state == "done"


def test_another_file_is_stale_and_needs_force(trained: tuple[RunDirectory, Path, dict], tmp_path: Path) -> None:
    finished, _, _ = trained
    shutil.copytree(finished.root, tmp_path / "run")
    run, other = RunDirectory.open(tmp_path / "run"), write_lines(tmp_path / "other.jsonl", skills=3)
    with pytest.raises(ArtifactError, match=r"made from something else.*annotations.*--force"):
        sft_skills.run(run, other)
    before = read_manifest(run.checkpoint_dir(0)).extra["weights_sha256"]
    assert sft_skills.run(run, other, force=True).state == "done"
    assert read_manifest(run.checkpoint_dir(0)).extra["weights_sha256"] != before


def test_the_first_rollout_is_played_by_the_tuned_weights(
    trained: tuple[RunDirectory, Path, dict], tmp_path: Path
) -> None:
    finished, _, _ = trained
    shutil.copytree(finished.root, tmp_path / "run")
    run = RunDirectory.open(tmp_path / "run")
    rollout.run(run, 1)
    with Workbench(run) as bench:
        assert bench.weights_sha256(0) == weights_sha256(run.checkpoint_dir(0) / "model")


def test_bad_sets_fail_before_any_training(policy: Path, tmp_path: Path) -> None:
    run = started(policy, tmp_path / "run")
    with pytest.raises(ConfigError, match="min_unique_skills"):
        sft_skills.run(run, write_lines(tmp_path / "one.jsonl", skills=1))
    with pytest.raises(ArtifactError, match="no such file"):
        sft_skills.run(run, tmp_path / "absent.jsonl")
    assert not run.checkpoint_dir(0).exists()
