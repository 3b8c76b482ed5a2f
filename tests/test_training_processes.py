"""Several training processes: the numbers of one, and their failures as our own errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from schemas.config import Config
from schemas.errors import LearnerError, NumericsError
from stages import launch
from stages.batch_file import load_batch, save_batch
from stages.learner import Learner, TrainingBatch
from tests.random_policy import random_rows, write_policy


def config(processes: int) -> Config:
    return Config.model_validate(
        {
            "objective": {"opsd_coef": 0.5, "skill_coef": 0.7, "kl_coef": 0.3},
            "optimizer": {"weight_decay": 0.1},
            "engine": {"max_logprob_gap": 100.0},
            "learner": {"micro_batch_tokens": 64, "logits_chunk": 16, "processes": processes},
            "run": {"threads": processes},
        }
    )


def test_two_gloo_processes_equal_one_and_resume_each_others_checkpoints(tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "policy", hidden=23)  # odd sizes: partitions with padding
    batch = TrainingBatch(random_rows(5), lr=1e-3, seed=0)
    one = Learner(policy, None, config(1), policy)
    first = one.update(batch)
    one.save(tmp_path / "one" / "model", tmp_path / "one" / "optimizer")
    expected = one.update(batch)
    weights, moments = one.state_dict(), dict(one._engine.full_moments("exp_avg"))
    one.close()
    job = tmp_path / "job"
    found = launch.train_in_processes(
        job,
        batch,
        config(2),
        model_dir=tmp_path / "one" / "model",
        optimizer_dir=tmp_path / "one" / "optimizer",
        reference_dir=policy,
        log_path=tmp_path / "log.txt",
    )
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=1e-6)
    assert found.metrics["updates"] == 2
    assert found.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-5)
    assert found.metrics["policy/tokens"] == expected.metrics["policy/tokens"]
    trained = load_file(job / "model" / "model.safetensors")
    assert max(float((trained[name] - weights[name]).abs().max()) for name in weights) < 1e-5
    saved = load_file(job / "optimizer" / "exp_avg.safetensors")
    assert (
        max(float((saved[name.removeprefix("policy.")] - value).abs().max()) for name, value in moments.items()) < 1e-5
    )
    again = Learner(job / "model", job / "optimizer", config(1), policy)
    assert again.updates == 2
    assert all(torch.equal(trained[name], value) for name, value in again.state_dict().items())
    again.close()
    for left, right in zip(found.trainer_logprobs, expected.trainer_logprobs, strict=True):
        assert float(abs(left - right).max()) < 1e-5
    assert first.metrics["loss"] != expected.metrics["loss"]


def launch_with(command: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_command", command)
    launch.train_in_processes(
        tmp_path / "job",
        TrainingBatch(random_rows(2), lr=1e-3, seed=0),
        config(2),
        model_dir=tmp_path,
        optimizer_dir=None,
        reference_dir=None,
        log_path=tmp_path / "log.txt",
    )


def test_a_workers_error_is_raised_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(job: Path, processes: int) -> list[str]:
        launch.write_error(job, 1, NumericsError("the loss is not finite", where="row1", expected="finite", found=1.5))
        return ["sh", "-c", "exit 1"]

    with pytest.raises(NumericsError) as caught:
        launch_with(failing, tmp_path, monkeypatch)
    assert str(caught.value) == "the loss is not finite (row1): expected finite, found 1.5"


def test_a_worker_that_dies_is_reported_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LearnerError, match="exit code 9: out of memory"):
        launch_with(lambda job, processes: ["sh", "-c", "echo out of memory >&2; exit 9"], tmp_path, monkeypatch)


def test_a_batch_file_gives_back_the_batch(tmp_path: Path) -> None:
    batch = TrainingBatch(random_rows(5), lr=0.25, seed=2**60 + 1)
    save_batch(tmp_path / "batch.safetensors", batch)
    found = load_batch(tmp_path / "batch.safetensors")
    assert (found.lr, found.seed) == (batch.lr, batch.seed)
    for left, right in zip(found.rows, batch.rows, strict=True):
        for name, value in vars(right).items():
            assert np.array_equal(getattr(left, name), value), name
