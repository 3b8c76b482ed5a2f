"""Loss terms, normalisers and token log-probabilities: numbers worked by hand, then properties."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stages.losses
import stages.token_logprobs
from schemas.errors import ConfigError, NumericsError
from stages.losses import (
    Denominators,
    count_denominators,
    gate,
    k3_kl,
    logprob_gap,
    logprob_mismatch,
    merge_metrics,
    opsd_loss,
    policy_gradient_loss,
    sequence_mean,
    skill_loss,
    token_mean,
    token_weights,
)
from stages.token_logprobs import head_logprobs, token_logprobs


def doubles(values, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def mask_of(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def gradient(loss: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, of)[0]


@pytest.mark.parametrize("module", [stages.losses, stages.token_logprobs])
def test_documented_examples_hold(module):
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0 and outcome.failed == 0


# --- normalisers


def test_token_mean_of_ones_is_one_though_masked_places_hold_fifties():
    values = doubles([[1.0, 1.0, 50.0, 50.0], [1.0, 1.0, 51.0, 1.0]], grad=True)
    mask = mask_of([[1, 1, 0, 0], [1, 1, 0, 1]])
    loss = token_mean(values, mask, tokens=5)
    assert loss.item() == pytest.approx(1.0, abs=1e-12)  # the mean over all places would be 156 / 8
    assert gradient(loss, values).tolist() == [[0.2, 0.2, 0.0, 0.0], [0.2, 0.2, 0.0, 0.2]]


def test_sequence_mean_gives_each_row_the_same_say():
    values = doubles([[2.0, 4.0, 6.0], [10.0, 99.0, 99.0], [99.0, 99.0, 99.0]], grad=True)
    mask = mask_of([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    loss = sequence_mean(values, mask, rows=2)
    assert loss.item() == pytest.approx((4.0 + 10.0) / 2)
    assert gradient(loss, values)[:, 0].tolist() == pytest.approx([1 / 6, 1 / 2, 0.0])


def test_denominators_count_tokens_rows_and_skills_and_add_up():
    rollout, skill = mask_of([[1, 1, 0], [0, 0, 0], [0, 0, 0]]), mask_of([[0, 0, 0], [1, 0, 0], [0, 0, 0]])
    counted = count_denominators(rollout, skill)
    assert counted == Denominators(2.0, 1.0, 1.0)
    assert Denominators(*(counted + counted).as_tuple()) == Denominators(4.0, 2.0, 2.0)


@pytest.mark.parametrize("loss_agg", ["token_mean", "sequence_mean"])
@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6))
def test_weights_sum_to_one_over_the_batch_and_are_zero_outside_the_mask(loss_agg, rows):
    mask = mask_of(rows)
    counted = count_denominators(mask)
    weights = token_weights(mask, loss_agg, counted.tokens, counted.rows)
    assert weights.sum().item() == pytest.approx(1.0 if mask.any() else 0.0)
    assert (weights[~mask] == 0.0).all()


def test_unknown_aggregation_and_missing_denominator_are_refused():
    with pytest.raises(ConfigError):
        token_weights(mask_of([[1]]), "token_sum", 1, 1)
    with pytest.raises(NumericsError):
        token_weights(mask_of([[1]]), "token_mean", 0, 1)


# --- policy gradient


def test_first_step_gradient_is_advantage_times_negative_weight():
    logprobs = doubles([[-1.0, -2.0], [-0.5, -9.0]], grad=True)
    mask = mask_of([[1, 1], [1, 0]])
    weights = token_weights(mask, "token_mean", 3, 2)
    term = policy_gradient_loss(logprobs, None, doubles([2.0, -1.0]), mask, weights)
    assert term.loss.item() == pytest.approx(-(2.0 + 2.0 - 1.0) / 3)
    torch.testing.assert_close(gradient(term.loss, logprobs), doubles([[-2 / 3, -2 / 3], [1 / 3, 0.0]]))
    assert term.metrics["clipped_tokens"] == 0 and term.metrics["ratio"] == 3 and term.metrics["ratio_max"] == 1


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "slope"),
    [
        (1.5, 1.0, 1.2, 0.0),  # already raised enough: cut
        (0.5, 1.0, 0.5, 0.5),  # good token made rarer: full gradient
        (0.5, -1.0, -0.8, 0.0),  # already lowered enough: cut
        (1.5, -1.0, -1.5, -1.5),  # bad token made likelier: full gradient
        (1.1, 2.0, 2.2, 2.2),
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, surrogate, slope):
    logprobs = doubles([[math.log(ratio)]], grad=True)
    one = mask_of([[1]])
    term = policy_gradient_loss(logprobs, doubles([[0.0]]), doubles([advantage]), one, one.double(), clip=0.2)
    assert term.loss.item() == pytest.approx(-surrogate)
    assert gradient(term.loss, logprobs).item() == pytest.approx(-slope)
    assert term.metrics["clipped_tokens"] == (slope == 0.0)


def test_old_logprobs_equal_to_the_current_ones_change_nothing():
    logprobs = doubles([[-1.3, -0.2], [-2.7, -0.01]], grad=True)
    ones, advantages = mask_of([[1, 1], [1, 1]]), doubles([[1.0, -2.0], [0.5, 0.0]])
    without = policy_gradient_loss(logprobs, None, advantages, ones, ones / 4)
    given_ = policy_gradient_loss(logprobs, logprobs.detach().clone(), advantages, ones, ones / 4)
    assert torch.equal(without.loss, given_.loss)
    assert torch.equal(gradient(without.loss, logprobs), gradient(given_.loss, logprobs))


def test_no_gradient_reaches_advantages_or_old_logprobs():
    logprobs, old, advantages = (doubles([[-1.0]], grad=True) for _ in range(3))
    one = mask_of([[1]])
    policy_gradient_loss(logprobs, old, advantages, one, one.double()).loss.backward()
    assert logprobs.grad is not None and old.grad is None and advantages.grad is None


# --- distillation


def test_opsd_value_and_gradient_by_hand():
    student, teacher = doubles([[-2.0, -1.0]], grad=True), doubles([[-1.0, -3.0]])
    ones = mask_of([[1, 1]])
    strength = gate(logprob_gap(student, teacher, ones)[0], slope=1.0) * 1.5
    up, down = 1.5 / (1 + math.exp(-1.0)), 1.5 / (1 + math.exp(2.0))
    term = opsd_loss(student, teacher, strength, ones, ones / 2)
    assert term.loss.item() == pytest.approx((up * 1.0 + down * -2.0) / 2)
    torch.testing.assert_close(gradient(term.loss, student), doubles([[-up / 2, -down / 2]]))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0)), min_size=1, max_size=8), st.floats(0.0, 2.0))
def test_opsd_only_ever_raises_sampled_tokens(pairs, omega):
    student, teacher = doubles([[s for s, _ in pairs]], grad=True), doubles([[t for _, t in pairs]])
    mask = torch.ones_like(student, dtype=torch.bool)
    strength = omega * gate(logprob_gap(student, teacher, mask)[0])
    found = gradient(opsd_loss(student, teacher, strength, mask, mask / len(pairs)).loss, student)
    assert (found <= 0.0).all()  # descending the loss raises the log-probability, whatever the teacher thinks
    torch.testing.assert_close(found, -strength / len(pairs))


def test_gate_and_teacher_are_stopped():
    student, teacher = doubles([[-2.0]], grad=True), doubles([[-1.0]], grad=True)
    one = mask_of([[1]])
    gap, _ = logprob_gap(student, teacher, one)
    strength = gate(gap)
    assert not gap.requires_grad and not strength.requires_grad
    opsd_loss(student, teacher, strength, one, one.double()).loss.backward()
    assert teacher.grad is None
    assert student.grad.item() == pytest.approx(-1 / (1 + math.exp(-5.0)))


def test_no_gradient_reaches_the_trust():
    student, strength = doubles([[-2.0]], grad=True), doubles([[0.7]], grad=True)
    one = mask_of([[1]])
    opsd_loss(student, doubles([[-1.0]]), strength, one, one.double()).loss.backward()
    assert strength.grad is None and student.grad.item() == pytest.approx(-0.7)


def test_tokens_without_a_teacher_have_no_distillation_but_stay_in_the_denominator():
    student = doubles([[-2.0, -1.0, -4.0]], grad=True)
    teacher = doubles([[-1.0, math.nan, -math.inf]])
    mask = mask_of([[1, 1, 1]])
    term = opsd_loss(student, teacher, doubles([[1.0, 1.0, 1.0]]), mask, token_weights(mask, "token_mean", 3, 1))
    assert term.loss.item() == pytest.approx(1 / 3)
    torch.testing.assert_close(gradient(term.loss, student), doubles([[-1 / 3, 0.0, 0.0]]))
    assert term.metrics["tokens"] == 1


# --- skill and KL


def test_skill_loss_is_a_mean_over_tokens_then_over_skills():
    logprobs = doubles([[-1.0, -2.0, -3.0], [-1.0, 0.0, 0.0]], grad=True)
    mask = mask_of([[1, 1, 1], [1, 0, 0]])
    term = skill_loss(logprobs, None, doubles([0.6, -1.0]), mask, skills=2)
    assert term.loss.item() == pytest.approx(-(0.6 - 1.0) / 2)
    torch.testing.assert_close(gradient(term.loss, logprobs), doubles([[-0.1] * 3, [0.5, 0.0, 0.0]]))
    assert term.metrics["sequences"] == 2 and term.metrics["tokens"] == 4


def test_skill_rows_without_tokens_may_lack_a_reward():
    logprobs = doubles([[-1.0], [-2.0]], grad=True)
    term = skill_loss(logprobs, None, doubles([1.0, math.nan]), mask_of([[1], [0]]), skills=1)
    assert term.loss.item() == -1.0
    assert gradient(term.loss, logprobs).tolist() == [[-1.0], [0.0]]


@settings(deadline=None)
@given(st.floats(-5, 0), st.floats(-5, 0))
def test_k3_is_never_negative_and_has_gradient_one_minus_ratio(policy, reference):
    logprobs = doubles([[policy]], grad=True)
    one = mask_of([[1]])
    term = k3_kl(logprobs, doubles([[reference]]), one, one.double())
    assert term.loss.item() >= 0.0
    assert gradient(term.loss, logprobs).item() == pytest.approx(1 - math.exp(reference - policy), abs=1e-12)


def test_no_gradient_reaches_the_reference():
    logprobs, reference = doubles([[-1.0]], grad=True), doubles([[-2.0]], grad=True)
    one = mask_of([[1]])
    k3_kl(logprobs, reference, one, one.double()).loss.backward()
    assert reference.grad is None and logprobs.grad is not None


def test_k3_expectation_is_the_exact_divergence():
    policy, reference = doubles([0.7, 0.2, 0.1]), doubles([0.5, 0.3, 0.2])
    every = torch.ones(1, 3, dtype=torch.bool)
    estimate = k3_kl(policy.log()[None], reference.log()[None], every, policy[None]).loss
    assert estimate.item() == pytest.approx((policy * (policy / reference).log()).sum().item())


# --- padding, micro-batches, mismatch


POISON = [math.nan, math.inf, -math.inf, -1e30]


@pytest.mark.parametrize("poison", POISON)
def test_padding_may_hold_anything_and_gets_exactly_no_gradient(poison):
    mask = mask_of([[1, 1, 0], [1, 0, 0]])
    clean = doubles([[-1.0, -2.0, 0.0], [-0.5, 0.0, 0.0]])
    dirty = clean.masked_fill(~mask, poison)
    other = dirty - 0.1
    counted = count_denominators(mask)
    weights = token_weights(mask, "token_mean", counted.tokens, counted.rows)
    reward = doubles([1.0, -0.5])
    terms = {
        "policy": lambda x: policy_gradient_loss(x, other, other, mask, weights),
        "opsd": lambda x: opsd_loss(x, other, gate(logprob_gap(x, other, mask)[0]), mask, weights),
        "skill": lambda x: skill_loss(x, other, reward, mask, 2),
        "kl": lambda x: k3_kl(x, other, mask, weights),
    }
    for term in terms.values():
        student = dirty.clone().requires_grad_()
        found = term(student)
        grad = gradient(found.loss, student)
        assert torch.isfinite(found.loss) and torch.isfinite(grad).all()
        assert (grad[~mask] == 0.0).all() and (grad[mask] != 0.0).all()
        assert all(torch.isfinite(value) for value in found.metrics.values())


def test_metrics_merge_by_sum_and_maxima_by_maximum():
    merged = merge_metrics([{"tokens": doubles(2.0), "ratio_max": doubles(1.5)}, {"tokens": doubles(3.0)}])
    merged = merge_metrics([merged, {"ratio_max": doubles(1.2)}])
    assert {name: value.item() for name, value in merged.items()} == {"tokens": 5.0, "ratio_max": 1.5}


def test_mismatch_by_hand_skips_and_counts_values_that_are_not_finite():
    engine, trainer = doubles([[-1.0, -2.0, math.nan, -7.0]]), doubles([[-1.1, -1.7, -1.0, math.inf]])
    found = logprob_mismatch(engine, trainer, mask_of([[1, 1, 1, 0]]))
    assert (found.tokens, found.non_finite) == (2.0, 1.0)
    assert found.mean == pytest.approx(0.2) and found.largest == pytest.approx(0.3)
    k3 = (math.exp(-0.1) - 1 + 0.1 + math.exp(0.3) - 1 - 0.3) / 2
    assert found.k3_mean == pytest.approx(k3)
    assert (found + found).mean == pytest.approx(0.2) and (found + found).largest == found.largest


def test_mismatch_of_nothing_is_zero():
    found = logprob_mismatch(doubles([[-1.0]]), doubles([[-2.0]]), mask_of([[0]]))
    assert (found.mean, found.largest, found.k3_mean) == (0.0, 0.0, 0.0)


# --- token log-probabilities


def dense(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(targets < 0, 0.0)


def random_problem(seed: int, rows: int = 3, places: int = 7, vocabulary: int = 11):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, places, vocabulary, generator=generator) * 3
    targets = torch.randint(-1, vocabulary, (rows, places), generator=generator)
    upstream = torch.randn(rows, places, generator=generator)
    return logits, targets, upstream


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("temperature", [0.05, 0.4, 1.0, 2.0])
def test_chunked_equals_dense_in_value_and_gradient(chunk, temperature):
    logits, targets, upstream = random_problem(seed=chunk)
    one, two = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    chunked, whole = token_logprobs(one, targets, temperature, chunk), dense(two, targets, temperature)
    torch.testing.assert_close(chunked, whole)
    mine, reference = gradient((chunked * upstream).sum(), one), gradient((whole * upstream).sum(), two)
    torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5 / temperature)  # the chain rule divides by it


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_gradient_agrees_with_finite_differences(temperature):
    logits, targets, _ = random_problem(seed=5, rows=2, places=3, vocabulary=4)
    logits = (logits.double() * temperature).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: token_logprobs(x, targets, temperature, 2), (logits,), eps=1e-6 * temperature
    )


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_head_by_slices_equals_full_logits_and_reaches_the_head(chunk):
    _, targets, upstream = random_problem(seed=9)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 7, 5, generator=generator)
    weight = torch.randn(11, 5, generator=generator)
    found = []
    for sliced in (True, False):
        states, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if sliced:
            values = head_logprobs(states, lambda x, head=head: x @ head.T, targets, 0.8, chunk)
        else:
            values = dense(states @ head.T, targets, 0.8)
        found.append((values, *torch.autograd.grad((values * upstream).sum(), [states, head])))
    for mine, reference in zip(*found, strict=True):
        torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_give_float32_values_and_finite_gradients_at_low_temperature(dtype):
    logits, targets, upstream = random_problem(seed=2)
    half = logits.to(dtype).requires_grad_()
    values = token_logprobs(half, targets, 0.05)
    assert values.dtype == torch.float32 and torch.isfinite(values).all()
    grad = gradient((values * upstream).sum(), half)
    assert grad.dtype == dtype and torch.isfinite(grad).all()
    torch.testing.assert_close(values, dense(half.detach(), targets, 0.05))


def test_padding_of_infinities_gets_zero_value_and_zero_gradient():
    logits, targets, _ = random_problem(seed=3)
    targets[:, 4:] = -1
    targets[:, :4] = targets[:, :4].clamp(min=0)
    logits[:, 4:] = -math.inf
    logits[0, 5] = math.nan
    logits = logits.requires_grad_()
    values = token_logprobs(logits, targets, 1.0, 3)
    grad = gradient(values.sum(), logits)
    assert torch.isfinite(values).all() and torch.isfinite(grad).all()
    assert (values[:, 4:] == 0.0).all() and (grad[:, 4:] == 0.0).all() and (grad[:, :4] != 0.0).any()


def test_forbidden_words_of_probability_zero_leave_the_gradient_finite():
    logits, targets, _ = random_problem(seed=4)
    targets = targets.clamp(min=0, max=5)
    logits[..., 6:] = -math.inf
    logits = logits.requires_grad_()
    grad = gradient(token_logprobs(logits, targets, 0.05, 2).sum(), logits)
    assert torch.isfinite(grad).all() and (grad[..., 6:] == 0.0).all()


def test_rows_of_no_place_keep_a_graph():
    hidden = torch.zeros(2, 0, 4, requires_grad=True)
    assert token_logprobs(hidden, torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0)
    head_logprobs(hidden, lambda x: x, torch.zeros(2, 0, dtype=torch.long)).sum().backward()


def largest_live_tensor(run) -> int:
    """Elements of the largest tensor that an operation inside `run` creates."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    with Watch():
        run()
    return largest


def test_head_by_slices_never_holds_all_logits_forward_or_backward():
    vocabulary, chunk = 64, 8

    def peak(places: int) -> int:
        hidden = torch.randn(1, places, 2, requires_grad=True)
        weight = torch.randn(vocabulary, 2, requires_grad=True)
        targets = torch.zeros(1, places, dtype=torch.long)
        return largest_live_tensor(
            lambda: head_logprobs(hidden, lambda x: x @ weight.T, targets, 1.0, chunk).sum().backward()
        )

    assert peak(32) == peak(128) == chunk * vocabulary


def saved_elements(run) -> int:
    """Elements that autograd keeps for the backward pass of `run`."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    assert output is not None
    return sum(kept.values())


def test_chunked_keeps_only_the_logits_it_was_given():
    logits, targets, _ = random_problem(seed=6, rows=2, places=16, vocabulary=50)
    logits = logits.requires_grad_()
    chunked = saved_elements(lambda: token_logprobs(logits, targets, 0.7, 4))
    assert chunked == logits.numel() + 2 * targets.numel()  # the logits themselves, targets, normalisers
    assert saved_elements(lambda: dense(logits, targets, 0.7)) >= logits.numel()


@pytest.mark.parametrize(("temperature", "chunk"), [(0.0, 8), (-1.0, 8), (math.nan, 8), (1.0, 0)])
def test_impossible_temperature_or_chunk_is_refused(temperature, chunk):
    with pytest.raises(ConfigError):
        token_logprobs(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), temperature, chunk)
