"""The learner: ZeRO-3 gives the numbers of plain torch, whatever the packing, the processes and the interruptions."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data.model_files import weights_sha256
from schemas.config import Config
from schemas.errors import ArtifactError, EngineError, LearnerError, NumericsError
from stages.checkpoints import load_model
from stages.learner import Learner, TrainingBatch
from stages.packing import TrainRow
from tests.random_policy import random_rows, write_policy

RATE = 1e-2


def config(**sections: dict) -> Config:
    """Large step sizes and losses of comparable size, so that a wrong term shows."""
    content: dict = {
        "objective": {"opsd_coef": 0.5, "skill_coef": 0.7, "kl_coef": 0.3},
        "optimizer": {"lr": RATE, "weight_decay": 0.1, "max_grad_norm": 0.7},
        "engine": {"max_logprob_gap": 100.0},
        "learner": {"micro_batch_tokens": 96, "logits_chunk": 16},
        "run": {"threads": 1},
    }
    for name, values in sections.items():
        content[name] = {**content.get(name, {}), **values}
    return Config.model_validate(content)


def batch(rows: list[TrainRow], lr: float = RATE) -> TrainingBatch:
    return TrainingBatch(rows, lr=lr, seed=3)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("reference") / "model", seed=5)


def plain_logprobs(
    model: torch.nn.Module, token_ids: np.ndarray, sampled: np.ndarray, temperature: float
) -> torch.Tensor:
    tokens = torch.from_numpy(token_ids.astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0, :-1].double() / temperature
    found = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
    return found[torch.from_numpy(sampled[1:])]


def plain_loss(
    model: torch.nn.Module, initial: torch.nn.Module, before: torch.nn.Module, rows: list[TrainRow]
) -> torch.Tensor:
    """Method section 3 written out row by row, for one optimiser step (ratio 1)."""
    tokens = sum(int(row.sampled.sum()) for row in rows if row.kind == "rollout")
    skills = sum(row.kind == "skill" for row in rows)
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        student = plain_logprobs(model, row.token_ids, row.sampled, 0.8)
        ratio = torch.exp(student - student.detach())
        if row.kind == "skill":
            loss = loss - 0.7 * (ratio * row.skill_reward).mean() / skills
            continue
        loss = loss - (ratio * row.advantage).sum() / tokens
        with torch.no_grad():
            difference = plain_logprobs(initial, row.token_ids, row.sampled, 0.8) - student.detach()
        difference = difference + student.detach() - student
        loss = loss + 0.3 * (torch.exp(difference) - 1 - difference).sum() / tokens
        if row.teacher_token_ids is not None:
            with torch.no_grad():
                teacher = plain_logprobs(before, row.teacher_token_ids, row.teacher_sampled, 0.8)
            gate = torch.sigmoid(5.0 * (teacher - student.detach()))
            loss = loss + 0.5 * (row.trust * gate * (teacher - student)).sum() / tokens
    return loss


def test_updates_equal_plain_torch_adamw_on_the_written_out_loss(policy: Path, reference: Path) -> None:
    rows = random_rows(7)
    learner = Learner(policy, None, config(), reference)
    plain, initial = load_model(policy), load_model(reference)
    adamw = torch.optim.AdamW(plain.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for _ in range(3):
        result = learner.update(batch(rows))
        before = load_model(policy)
        before.load_state_dict(plain.state_dict())
        loss = plain_loss(plain, initial, before, rows)
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.7)
        adamw.step()
        assert result.metrics["loss"] == pytest.approx(float(loss.detach()), abs=2e-5)
        assert result.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    own, other = learner.state_dict(), plain.state_dict()
    assert max(float((own[name] - other[name]).abs().max()) for name in own) < 2e-4
    assert learner.updates == 3
    learner.close()


def test_first_update_equals_plain_torch_to_1e_6_where_the_gradient_is_not_tiny(policy: Path, reference: Path) -> None:
    # One step of AdamW moves by about lr * sign(gradient); where the gradient is rounding noise so is the move.
    rows = random_rows(7)
    learner = Learner(policy, None, config(), reference)
    learner.update(batch(rows))
    plain, before, initial = load_model(policy), load_model(policy), load_model(reference)
    adamw = torch.optim.AdamW(plain.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    plain_loss(plain, initial, before, rows).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.7)
    gradients = {name: parameter.grad.abs() for name, parameter in plain.named_parameters()}
    adamw.step()
    own, compared = learner.state_dict(), 0
    for name, parameter in plain.named_parameters():
        firm = gradients[name] > 1e-3
        compared += int(firm.sum())
        assert torch.allclose(own[name][firm], parameter.detach()[firm], rtol=0, atol=1e-6)
    assert compared > 500
    learner.close()


def test_resuming_in_a_new_learner_is_bit_identical_to_going_on(policy: Path, tmp_path: Path) -> None:
    rows, settings = random_rows(6), config(objective={"kl_coef": 0.0})
    whole = Learner(policy, None, settings)
    for _ in range(2):
        whole.update(batch(rows))
    whole.save(tmp_path / "half" / "model", tmp_path / "half" / "optimizer")
    for _ in range(2):
        whole.update(batch(rows))
    expected = whole.save(tmp_path / "whole" / "model", tmp_path / "whole" / "optimizer")
    whole.close()
    resumed = Learner(tmp_path / "half" / "model", tmp_path / "half" / "optimizer", settings)
    assert resumed.updates == 2
    for _ in range(2):
        resumed.update(batch(rows))
    assert resumed.save(tmp_path / "again" / "model", tmp_path / "again" / "optimizer") == expected
    for name in ("model/model.safetensors", "optimizer/exp_avg.safetensors", "optimizer/exp_avg_sq.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    resumed.close()


def test_forgetting_the_optimizer_state_changes_the_result(policy: Path, tmp_path: Path) -> None:
    rows, settings = random_rows(6), config(objective={"kl_coef": 0.0})
    learner = Learner(policy, None, settings)
    learner.update(batch(rows))
    learner.save(tmp_path / "model", tmp_path / "optimizer")
    learner.update(batch(rows))
    fresh = Learner(tmp_path / "model", None, settings)
    fresh.update(batch(rows))
    own, other = learner.state_dict(), fresh.state_dict()
    assert max(float((own[name] - other[name]).abs().max()) for name in own) > 1e-4
    learner.close()
    fresh.close()


def test_loss_and_weights_do_not_depend_on_the_packing(policy: Path, reference: Path) -> None:
    rows = random_rows(9)
    found = []
    for tokens, chunk in ((64, 16), (200, 16), (4096, 1024)):
        learner = Learner(
            policy, None, config(learner={"micro_batch_tokens": tokens, "logits_chunk": chunk}), reference
        )
        metrics = learner.update(batch(rows, lr=1e-4)).metrics
        found.append((metrics, learner.state_dict()))
        learner.close()
    (first, weights), others = found[0], found[1:]
    for metrics, state in others:
        assert set(metrics) == set(first)
        for name, value in metrics.items():
            assert value == pytest.approx(first[name], rel=1e-4, abs=1e-6), name
        assert max(float((state[name] - weights[name]).abs().max()) for name in state) < 1e-5


def test_logprobs_equal_the_models_own_at_the_temperature(policy: Path) -> None:
    rows = random_rows(5)
    learner = Learner(policy, None, config(learner={"logits_chunk": 16, "micro_batch_tokens": 4096}))
    model = load_model(policy)
    for row, found in zip(rows, learner.logprobs([replace(row, temperature=0.6) for row in rows]), strict=True):
        expected = plain_logprobs(model, row.token_ids, row.sampled, 0.6).detach().numpy()
        assert np.allclose(found, expected, atol=1e-5)
    learner.close()


def test_trainer_and_teacher_logprobs_are_those_before_the_update(policy: Path) -> None:
    rows = random_rows(6)
    learner = Learner(policy, None, config(objective={"kl_coef": 0.0}))
    before = learner.logprobs(rows)
    result = learner.update(batch(rows))
    after = learner.logprobs(rows)
    assert all(np.allclose(left, right, atol=1e-5) for left, right in zip(before, result.trainer_logprobs, strict=True))
    assert not np.allclose(before[0], after[0], atol=1e-3)
    model = load_model(policy)
    for row, found in zip(rows, result.teacher_logprobs, strict=True):
        assert (found is None) == (row.teacher_token_ids is None)
        if found is not None:
            expected = plain_logprobs(model, row.teacher_token_ids, row.teacher_sampled, 0.8).detach().numpy()
            assert np.allclose(found, expected, atol=1e-5)
    learner.close()


def test_with_mini_batches_the_old_logprobs_are_fixed_before_the_first_step(policy: Path) -> None:
    rows = random_rows(8)
    settings = config(objective={"kl_coef": 0.0}, learner={"minibatch_rows": 3}, optimizer={"lr": 0.05})
    learner = Learner(policy, None, settings)
    before = learner.logprobs(rows)
    result = learner.update(batch(rows, lr=0.05))
    assert result.metrics["optimizer_steps"] == learner.updates == 3
    assert all(np.allclose(left, right, atol=1e-5) for left, right in zip(before, result.trainer_logprobs, strict=True))
    assert result.metrics["policy/ratio_max"] > 1.01  # later steps are off the old policy
    learner.close()


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_the_weights_change(policy: Path, fault: float) -> None:
    rows = random_rows(4)
    learner = Learner(policy, None, config(objective={"kl_coef": 0.0}))
    before = learner.state_dict()
    object.__setattr__(rows[1], "advantage", fault)
    with pytest.raises(NumericsError, match="row1"):
        learner.update(batch(rows))
    after = learner.state_dict()
    assert learner.updates == 0 and all(torch.equal(before[name], after[name]) for name in before)
    learner.update(batch(random_rows(4)))  # nothing of the failed step is left in the gradients
    again = Learner(policy, None, config(objective={"kl_coef": 0.0}))
    again.update(batch(random_rows(4)))
    own, other = learner.state_dict(), again.state_dict()
    assert all(torch.equal(own[name], other[name]) for name in own)
    learner.close()
    again.close()


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(policy: Path) -> None:
    rows = random_rows(4)
    learner = Learner(policy, None, config(objective={"kl_coef": 0.0}))
    before = learner.state_dict()
    handle = next(learner._engine.module.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NumericsError, match="gradient"):
        learner.update(batch(rows))
    handle.remove()
    after = learner.state_dict()
    assert learner.updates == 0 and all(torch.equal(before[name], after[name]) for name in before)
    learner.close()


def test_a_gap_between_engine_and_trainer_is_refused_before_the_weights_change(policy: Path) -> None:
    learner = Learner(policy, None, config(engine={"max_logprob_gap": 0.05}, objective={"kl_coef": 0.0}))
    before = learner.state_dict()
    with pytest.raises(EngineError, match="max_logprob_gap"):
        learner.update(batch(random_rows(4)))
    after = learner.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    learner.close()


def test_rsipo_without_trust_and_skill_loss_is_grpo_bit_for_bit(policy: Path) -> None:
    rows = random_rows(6)
    untrusted = [replace(row, trust=0.0) for row in rows]
    states = []
    for settings, chosen in (
        (config(objective={"skill_coef": 0.0, "kl_coef": 0.0}), untrusted),
        (config(objective={"skill_coef": 0.0, "kl_coef": 0.0, "opsd_coef": 0.0}), rows),
        (config(objective={"skill_coef": 0.0, "kl_coef": 0.0}), rows),
    ):
        learner = Learner(policy, None, settings)
        learner.update(batch([row for row in chosen if row.kind == "rollout"]))
        states.append(learner.state_dict())
        learner.close()
    rsipo, grpo, trusted = states
    assert all(torch.equal(rsipo[name], grpo[name]) for name in grpo)
    assert not all(torch.equal(trusted[name], grpo[name]) for name in grpo)


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_model_keeps_keys_tying_and_logits(tmp_path: Path, tied: bool) -> None:
    source = write_policy(tmp_path / "source", tied=tied)
    learner = Learner(source, None, config(objective={"kl_coef": 0.0}))
    learner.update(batch(random_rows(4)))
    rows = random_rows(3, seed=9)
    expected = learner.logprobs(rows)
    named = learner.save(tmp_path / "model", tmp_path / "optimizer")
    learner.close()
    assert named == weights_sha256(tmp_path / "model") != weights_sha256(source)
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == set(load_file(source / "model.safetensors"))
    model = load_model(tmp_path / "model")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    for row, values in zip(rows, expected, strict=True):
        assert np.allclose(plain_logprobs(model, row.token_ids, row.sampled, 0.8).detach().numpy(), values, atol=1e-5)


def test_updated_weights_have_no_name_until_they_are_saved(policy: Path) -> None:
    learner = Learner(policy, None, config(objective={"kl_coef": 0.0}))
    assert learner.weights_sha256 == weights_sha256(policy)
    learner.update(batch(random_rows(4)))
    with pytest.raises(LearnerError):
        _ = learner.weights_sha256
    learner.close()


def test_bfloat16_keeps_float32_masters_across_a_restart(tmp_path: Path, policy: Path) -> None:
    from stages.checkpoints import import_model

    import_model(policy, tmp_path / "source", "bfloat16")
    settings = config(model={"dtype": "bfloat16"}, objective={"kl_coef": 0.0})
    rows = random_rows(4)
    whole = Learner(tmp_path / "source", None, settings)
    for _ in range(2):
        whole.update(batch(rows, lr=1e-4))  # far below one bfloat16 step of most weights
    whole.save(tmp_path / "half" / "model", tmp_path / "half" / "optimizer")
    whole.update(batch(rows, lr=1e-4))
    expected = whole.save(tmp_path / "whole" / "model", tmp_path / "whole" / "optimizer")
    whole.close()
    resumed = Learner(tmp_path / "half" / "model", tmp_path / "half" / "optimizer", settings)
    resumed.update(batch(rows, lr=1e-4))
    assert resumed.save(tmp_path / "again" / "model", tmp_path / "again" / "optimizer") == expected
    masters = "optimizer/master.safetensors"
    assert (tmp_path / "whole" / masters).read_bytes() == (tmp_path / "again" / masters).read_bytes()
    resumed.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_disk_space_asked_for_before_an_update_holds_the_checkpoint(
    tmp_path: Path, policy: Path, dtype: str
) -> None:
    from stages.checkpoints import import_model, next_checkpoint_bytes

    import_model(policy, tmp_path / "source", dtype)
    learner = Learner(tmp_path / "source", None, config(model={"dtype": dtype}, objective={"kl_coef": 0.0}))
    learner.update(batch(random_rows(4)))
    learner.save(tmp_path / "made" / "model", tmp_path / "made" / "optimizer")
    learner.close()
    tensors = sum(file.stat().st_size for file in (tmp_path / "made").rglob("*.safetensors"))
    assert tensors <= next_checkpoint_bytes(tmp_path / "source", dtype) <= 1.3 * tensors


def test_an_optimizer_state_of_another_model_is_refused(tmp_path: Path, policy: Path) -> None:
    learner = Learner(policy, None, config(objective={"kl_coef": 0.0}))
    learner.update(batch(random_rows(4)))
    learner.save(tmp_path / "model", tmp_path / "optimizer")
    learner.close()
    untied = write_policy(tmp_path / "untied", tied=False)
    with pytest.raises(ArtifactError, match="does not fit"):
        Learner(untied, tmp_path / "optimizer", config())
    (tmp_path / "optimizer" / "exp_avg.safetensors").unlink()
    with pytest.raises(ArtifactError, match="incomplete"):
        Learner(tmp_path / "model", tmp_path / "optimizer", config())


def test_supervised_updates_lower_the_negative_log_likelihood(policy: Path) -> None:
    rows = [replace(row, temperature=1.0) for row in random_rows(6, skills=0)]
    learner = Learner(policy, None, config())
    losses = [learner.supervised_update(rows, RATE)["loss"] for _ in range(4)]
    model = load_model(policy)
    tokens = sum(row.sampled_tokens for row in rows)
    values = [plain_logprobs(model, row.token_ids, row.sampled, 1.0).detach().sum() for row in rows]
    start = -float(sum(values)) / tokens
    assert losses[0] == pytest.approx(start, abs=1e-4) and losses[-1] < losses[0] - 0.3
    learner.close()


def test_a_learner_says_its_number_of_threads_even_where_torch_would_take_it_anyway(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", said.append)
    Learner(policy, None, config(run={"threads": 0}))
    assert said == [len(os.sched_getaffinity(0))]
    # In a training process `run.threads` is already its share.
    Learner(policy, None, config(run={"threads": 2}, learner={"micro_batch_tokens": 96, "processes": 3}))
    assert said[1:] == [2]
