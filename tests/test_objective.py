"""The composed objective: equalities between methods, invariances, what it asks for and what it refuses."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.config import ADVANTAGES, ObjectiveSection
from schemas.errors import ConfigError, NumericsError
from stages.learner import objective_of
from stages.loss_parts import ADVANTAGE_PARTS, ROLLOUT_ROW, SKILL_ROW, LossInputs
from stages.losses import Denominators, LossTerm, merge_metrics
from stages.objective import Objective, check_realised, summarise
from stages.parts import Registry
from stages.token_credit import RLSDAdvantage

ROWS, PLACES = 8, 6
NO_KL = {"kl_coefficient": 0.0}


def batch(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> LossInputs:
    """Six rollout rows and two skill rows with ragged masks; every term has something to do."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    student = -draw(ROWS, PLACES).abs() - 0.01
    lengths = torch.tensor([6, 3, 0, 5, 1, 4, 6, 2])
    kind = torch.tensor([ROLLOUT_ROW] * 6 + [SKILL_ROW] * 2)
    inputs = LossInputs(
        student_logprobs=student.requires_grad_(),
        mask=torch.arange(PLACES) < lengths.unsqueeze(-1),
        kind=kind,
        advantages=draw(ROWS),
        old_logprobs=student.detach() + draw(ROWS, PLACES, scale=0.2),
        teacher_logprobs=student.detach() + draw(ROWS, PLACES, scale=0.5),
        reference_logprobs=student.detach() + draw(ROWS, PLACES, scale=0.3),
        trust=torch.tensor([0.0, 2.0, 1.0, 0.4, 1.3, 0.7, 1.0, 1.0], dtype=dtype),
        skill_reward=torch.tensor([math.nan] * 6 + [0.8, -0.6], dtype=dtype),
    )
    return replace(inputs, **changes)


def take(inputs: LossInputs, rows) -> LossInputs:
    """Some rows of a batch, as tensors that still lead back to the whole batch's log-probabilities."""
    values = {name: getattr(inputs, name) for name in LossInputs.__dataclass_fields__ if name != "extras"}
    return LossInputs(**{name: None if value is None else value[rows] for name, value in values.items()})


def loss_and_gradient(objective: Objective, inputs: LossInputs, pieces=None):
    """Loss, gradient and merged metrics, computed micro-batch by micro-batch."""
    pieces = [inputs] if pieces is None else pieces
    total = sum((piece.denominators() for piece in pieces), Denominators())
    outputs = [objective.compute(piece, total) for piece in pieces]
    loss = sum(output.loss for output in outputs)
    gradient = torch.autograd.grad(loss, inputs.student_logprobs)[0]
    return loss.detach(), gradient, merge_metrics(output.metrics for output in outputs)


def same_bits(one, two) -> bool:
    return torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


# --- methods that must coincide


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss_agg", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("old", [True, False])
def test_no_trust_and_no_skill_loss_is_grpo_bit_for_bit(dtype, loss_agg, old):
    inputs = batch(dtype=dtype, trust=torch.zeros(ROWS, dtype=dtype))
    inputs = inputs if old else replace(inputs, old_logprobs=None)
    rsipo = Objective.from_config(skill_coefficient=0.0, opsd_coefficient=0.7, loss_agg=loss_agg)
    grpo = Objective.from_config(skill_coefficient=0.0, opsd_coefficient=0.0, loss_agg=loss_agg)
    assert same_bits(loss_and_gradient(rsipo, inputs), loss_and_gradient(grpo, inputs))
    assert not same_bits(loss_and_gradient(rsipo, batch(dtype=dtype)), loss_and_gradient(grpo, batch(dtype=dtype)))


def test_a_gate_without_slope_is_the_constant_gate_bit_for_bit():
    flat = {"distillation_options": {"slope": 0.0, "trusted": False}}
    sdar = Objective.from_config(skill_coefficient=0.0, opsd_coefficient=0.3, **flat)
    constant = Objective.from_config(skill_coefficient=0.0, opsd_coefficient=0.3, distillation_weight="constant")
    steep = Objective.from_config(skill_coefficient=0.0, opsd_coefficient=0.3, distillation_options={"trusted": False})
    inputs = batch()
    assert same_bits(loss_and_gradient(sdar, inputs), loss_and_gradient(constant, inputs))
    assert not same_bits(loss_and_gradient(steep, inputs), loss_and_gradient(constant, inputs))


def test_without_trust_equals_trust_of_one_everywhere():
    inputs = batch(trust=torch.ones(ROWS, dtype=torch.float64))
    ablation = Objective.from_config(distillation_options={"trusted": False})
    assert same_bits(loss_and_gradient(Objective.from_config(), inputs), loss_and_gradient(ablation, batch()))
    assert same_bits(
        loss_and_gradient(Objective.from_config(), inputs),
        loss_and_gradient(Objective.from_config(), replace(inputs, trust=None)),
    )


@pytest.mark.parametrize("part", ["opsd", "skill", "kl"])
def test_a_part_of_coefficient_zero_is_skipped_and_its_inputs_are_not_needed(part):
    missing = {"opsd": "teacher_logprobs", "skill": "skill_reward", "kl": "reference_logprobs"}[part]
    objective = Objective.from_config(**{f"{part}_coefficient": 0.0})
    with_it = loss_and_gradient(objective, batch())
    without = loss_and_gradient(objective, batch(**{missing: None}))
    assert same_bits(with_it, without)
    assert part not in objective.enabled and not any(name.startswith(part) for name in with_it[2])


def test_an_objective_says_which_passes_it_needs():
    def needs(**options):
        found = Objective.from_config(**options)
        return found.needs_teacher, found.needs_reference, found.needs_skill_rows

    assert needs() == (True, True, True)
    assert needs(opsd_coefficient=0.0) == (False, True, True)
    assert needs(kl_coefficient=0.0) == (True, False, True)
    assert needs(skill_coefficient=0.0) == (True, True, False)


def test_opsd_alone_needs_no_grpo():
    objective = Objective.from_config(
        grpo_coefficient=0.0, skill_coefficient=0.0, distillation_weight="constant", opsd_coefficient=1.0, **NO_KL
    )
    assert objective.enabled == ("opsd",)
    _, gradient, _ = loss_and_gradient(objective, batch())
    rollout = batch().rollout_mask
    torch.testing.assert_close(gradient[rollout], torch.full_like(gradient[rollout], -0.5 / 19))  # 19 rollout tokens
    assert (gradient[~rollout] == 0.0).all()


def test_the_loss_is_the_coefficients_times_the_terms():
    objective = Objective.from_config(opsd_coefficient=0.5, skill_coefficient=0.25, kl_coefficient=0.125)
    loss, _, metrics = loss_and_gradient(objective, batch())
    parts = [metrics[f"{name}/loss"].item() for name in ("policy", "opsd", "skill", "kl")]
    assert loss.item() == pytest.approx(parts[0] + 0.5 * parts[1] + 0.25 * parts[2] + 0.125 * parts[3])
    assert metrics["loss"].item() == pytest.approx(loss.item())


def test_rollout_terms_leave_skill_rows_alone_and_the_skill_term_leaves_rollouts_alone():
    skill_only = Objective.from_config(grpo_coefficient=0.0, opsd_coefficient=0.0, **NO_KL)
    no_skill = Objective.from_config(skill_coefficient=0.0)
    assert (loss_and_gradient(skill_only, batch())[1][:6] == 0.0).all()
    assert (loss_and_gradient(no_skill, batch())[1][6:] == 0.0).all()


def test_trust_changes_the_gradient_of_its_own_row_only():
    base = batch()
    trust = base.trust.clone()
    trust[3] += 0.5
    one = loss_and_gradient(Objective.from_config(), base)[1]
    two = loss_and_gradient(Objective.from_config(), batch(trust=trust))[1]
    assert [bool((one[row] != two[row]).any()) for row in range(ROWS)] == [row == 3 for row in range(ROWS)]


def test_a_skill_without_a_reward_is_left_out_of_numerator_and_denominator():
    alone = batch(skill_reward=torch.tensor([math.nan] * 6 + [0.8, math.nan], dtype=torch.float64))
    objective = Objective.from_config(grpo_coefficient=0.0, opsd_coefficient=0.0, skill_coefficient=1.0, **NO_KL)
    _, gradient, metrics = loss_and_gradient(objective, replace(alone, old_logprobs=None))
    torch.testing.assert_close(gradient[6], torch.full_like(gradient[6], -0.8 / 6))
    assert (gradient[7] == 0.0).all()
    assert metrics["skill/candidate_tokens"] == 8 and metrics["skill/tokens"] == 6


# --- invariances


@pytest.mark.parametrize("loss_agg", ["token_mean", "sequence_mean"])
@settings(deadline=None, max_examples=40)
@given(st.permutations(range(ROWS)), st.lists(st.integers(1, ROWS - 1), max_size=4), st.integers(0, 5))
def test_loss_gradient_and_metrics_ignore_micro_batches_and_row_order(loss_agg, order, cuts, seed):
    objective = Objective.from_config(opsd_coefficient=0.4, skill_coefficient=0.3, loss_agg=loss_agg)
    inputs = batch(seed)
    edges = [0, *sorted(set(cuts)), ROWS]
    pieces = [take(inputs, list(order[low:high])) for low, high in itertools.pairwise(edges)]
    whole, split = loss_and_gradient(objective, inputs), loss_and_gradient(objective, inputs, pieces)
    torch.testing.assert_close(split[0], whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-12, atol=1e-12)
    assert split[2].keys() == whole[2].keys()
    for name, value in whole[2].items():
        torch.testing.assert_close(split[2][name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf, -math.inf])
def test_padding_changes_neither_loss_nor_gradient(poison):
    inputs = batch()

    def widened(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values, torch.full((ROWS, 3), poison, dtype=values.dtype)], dim=1)

    wide = replace(
        inputs,
        student_logprobs=widened(inputs.student_logprobs.detach()).requires_grad_(),
        mask=torch.cat([inputs.mask, torch.zeros(ROWS, 3, dtype=torch.bool)], dim=1),
        old_logprobs=widened(inputs.old_logprobs),
        teacher_logprobs=widened(inputs.teacher_logprobs),
        reference_logprobs=widened(inputs.reference_logprobs),
    )
    narrow_result = loss_and_gradient(Objective.from_config(), inputs)
    wide_result = loss_and_gradient(Objective.from_config(), wide)
    torch.testing.assert_close(wide_result[0], narrow_result[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(wide_result[1][:, :PLACES], narrow_result[1], rtol=1e-12, atol=1e-14)
    assert (wide_result[1][:, PLACES:] == 0.0).all()


def test_a_micro_batch_without_targets_adds_nothing_but_can_be_differentiated():
    inputs = batch()
    empty = take(inputs, [2])
    output = Objective.from_config().compute(empty, inputs.denominators())
    output.loss.backward()
    assert output.loss.item() == 0.0 and (inputs.student_logprobs.grad == 0.0).all()


# --- metrics


def test_metrics_count_clipped_gated_and_active_tokens():
    inputs = LossInputs(
        student_logprobs=torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]], requires_grad=True),
        mask=torch.tensor([[True, True, True], [True, False, False]]),
        kind=torch.tensor([ROLLOUT_ROW, ROLLOUT_ROW]),
        advantages=torch.tensor([1.0, 0.0]),
        old_logprobs=torch.tensor([[-2.0, -1.0, -1.0], [-1.0, 0.0, 0.0]]),
        teacher_logprobs=torch.tensor([[-0.5, -1.5, math.nan], [-0.9, 0.0, 0.0]]),
        trust=torch.tensor([0.0, 1.5]),
    )
    objective = Objective.from_config(skill_coefficient=0.0, **NO_KL)
    numbers = summarise(loss_and_gradient(objective, inputs)[2])
    assert numbers["policy/clipped_share"] == 0.25 and numbers["policy/active_share"] == 0.75
    assert numbers["policy/ratio_max"] == pytest.approx(math.e)
    assert numbers["policy/ratio_mean"] == pytest.approx((math.e + 3) / 4)
    assert (numbers["opsd/candidate_tokens"], numbers["opsd/tokens"], numbers["opsd/active_tokens"]) == (4, 3, 1)
    assert numbers["opsd/gated_share"] == pytest.approx(2 / 3)
    assert numbers["opsd/gap_mean"] == pytest.approx((0.5 - 0.5 + 0.1) / 3, abs=1e-6)


def test_a_loss_that_reaches_no_token_is_an_error_that_names_it():
    objective = Objective.from_config()
    _, _, metrics = loss_and_gradient(objective, batch())
    check_realised(metrics, objective.enabled)
    unscored = batch(teacher_logprobs=torch.full((ROWS, PLACES), math.nan, dtype=torch.float64))
    _, _, metrics = loss_and_gradient(objective, unscored)
    with pytest.raises(NumericsError, match="opsd.*0 of 19 candidate"):
        check_realised(metrics, objective.enabled)
    with pytest.raises(NumericsError, match="absent"):
        check_realised(metrics, ["absent"])


def test_trust_of_zero_everywhere_still_reaches_its_tokens():
    objective = Objective.from_config()
    _, _, metrics = loss_and_gradient(objective, batch(trust=torch.zeros(ROWS)))
    check_realised(metrics, objective.enabled)
    assert metrics["opsd/active_tokens"] == 0 and metrics["opsd/tokens"] == 19


@pytest.mark.parametrize("missing", ["teacher_logprobs", "reference_logprobs"])
def test_a_needed_pass_that_is_missing_is_an_error(missing):
    inputs = batch(**{missing: None})
    with pytest.raises(NumericsError, match=missing.split("_")[0]):
        Objective.from_config().compute(inputs, inputs.denominators())


# --- plug-in points


@dataclass(frozen=True)
class HalvedAdvantage:
    """A user's own token credit."""

    factor: float = 0.5
    needs_teacher = True

    def token_advantages(self, inputs: LossInputs) -> torch.Tensor:
        return inputs.advantages.unsqueeze(-1).expand_as(inputs.mask) * self.factor


@dataclass(frozen=True)
class LengthPart:
    """A user's own loss term."""

    coefficient: float = 1.0
    name = "length"
    needs_teacher = False
    needs_reference = True
    needs_skill_rows = False

    def compute(self, inputs: LossInputs, denominators: Denominators) -> LossTerm:
        tokens = inputs.rollout_mask.double().sum()
        loss = inputs.student_logprobs[inputs.rollout_mask].sum() / denominators.tokens
        return LossTerm(loss, {"tokens": tokens, "candidate_tokens": tokens})


def test_parts_of_a_user_are_named_by_import_string():
    objective = Objective.from_config(
        advantage=f"{__name__}:HalvedAdvantage",
        advantage_options={"factor": 0.25},
        opsd_coefficient=0.0,
        skill_coefficient=0.0,
        extra_parts=[(f"{__name__}:LengthPart", {"coefficient": 2.0})],
        **NO_KL,
    )
    assert objective.enabled == ("policy", "length") and objective.needs_teacher and objective.needs_reference
    plain = Objective.from_config(opsd_coefficient=0.0, skill_coefficient=0.0, **NO_KL)
    mine, theirs = loss_and_gradient(objective, batch()), loss_and_gradient(plain, batch())
    expected = theirs[1] * 0.25 + 2.0 / 19 * batch().rollout_mask
    torch.testing.assert_close(mine[1], expected)
    check_realised(mine[2], objective.enabled)


@dataclass(frozen=True)
class QuarterGate:
    """A user's own gate; it knows nothing of trust."""

    def strength(self, inputs: LossInputs, gap: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gap, 0.25)


def test_the_configuration_names_every_advantage_and_its_options_reach_the_class():
    assert ADVANTAGE_PARTS.names() == ADVANTAGES
    section = ObjectiveSection(advantage="rlsd", advantage_options={"mix": 0.25}, opsd_coef=0.0, skill_coef=0.0)
    objective = objective_of(section)
    assert objective.parts[0].advantage == RLSDAdvantage(mix=0.25)
    assert objective.needs_teacher and objective.advantage_needs_teacher
    assert not objective_of(ObjectiveSection()).advantage_needs_teacher
    with pytest.raises(ConfigError, match="unknown option 'mux'.*did you mean 'mix'"):
        objective_of(ObjectiveSection(advantage="rlsd", advantage_options={"mux": 0.25}))


def test_a_gate_of_a_user_is_multiplied_by_trust_unless_the_weight_is_one():
    gate = f"{__name__}:QuarterGate"
    only = {"grpo_coef": 0.0, "skill_coef": 0.0, "kl_coef": 0.0, "opsd_coef": 1.0}
    inputs = replace(batch(), trust=torch.full((len(batch().kind),), 2.0, dtype=torch.float64))

    def loss(**changes):
        return loss_and_gradient(objective_of(ObjectiveSection(**only, **changes)), inputs)[0]

    constant = loss(opsd_gate="constant", opsd_weight="one")
    torch.testing.assert_close(loss(opsd_gate=gate, opsd_weight="one"), constant / 2)
    torch.testing.assert_close(loss(opsd_gate=gate, opsd_weight="trust"), constant)


@pytest.mark.parametrize("key", ["opsd_gate", "advantage"])
def test_a_class_that_is_no_such_part_is_refused_when_the_objective_is_built(key):
    with pytest.raises(ConfigError, match="LengthPart' is no "):
        objective_of(ObjectiveSection(**{key: f"{__name__}:LengthPart"}))


def test_unknown_names_and_options_are_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean 'gated'"):
        Objective.from_config(distillation_weight="gatd")
    with pytest.raises(ConfigError, match="did you mean 'slope'"):
        Objective.from_config(distillation_options={"slop": 1.0})
    with pytest.raises(ConfigError, match="token_sum"):
        Objective.from_config(loss_agg="token_sum")
    with pytest.raises(ConfigError, match="cannot import"):
        Objective.from_config(advantage="no_such_module:Nothing")


def test_a_registry_refuses_a_name_twice():
    registry: Registry[object] = Registry("thing")
    registry.register("one")(HalvedAdvantage)
    with pytest.raises(ValueError, match="already"):
        registry.register("one")(LengthPart)
    assert registry.names() == ("one",)
