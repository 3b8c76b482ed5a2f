"""Token credit of RLSD, OPID and AgentOPSD: numbers worked by hand and the properties that hold exactly."""

from __future__ import annotations

import doctest
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stages.token_credit
from schemas.errors import ConfigError, NumericsError
from stages.loss_parts import ROLLOUT_ROW, LossInputs
from stages.objective import Objective
from stages.token_credit import agent_opsd_credit

ALONE = {"opsd_coefficient": 0.0, "skill_coefficient": 0.0, "kl_coefficient": 0.0}


def inputs() -> LossInputs:
    student = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    return LossInputs(
        student_logprobs=student,
        mask=torch.tensor([[True, True, True], [True, True, False]]),
        kind=torch.tensor([ROLLOUT_ROW, ROLLOUT_ROW]),
        advantages=torch.tensor([2.0, -1.0], dtype=torch.float64),
        teacher_logprobs=torch.tensor([[-0.9, -3.0, math.nan], [-0.9, 2.0, 0.0]], dtype=torch.float64),
    )


def token_gradient(**options) -> torch.Tensor:
    """Minus the token advantages, 0 in padding: the first-step gradient of the summed loss."""
    batch = inputs()
    loss = Objective.from_config(**ALONE, **options).compute(batch, batch.denominators()).loss * 5
    return torch.autograd.grad(loss, batch.student_logprobs)[0]


def test_documented_examples_hold():
    outcome = doctest.testmod(stages.token_credit)
    assert outcome.attempted > 0 and outcome.failed == 0


def test_rlsd_by_hand():
    up, down = math.exp(0.1), math.exp(-0.1)
    expected = [[2 * (0.5 + 0.5 * up), 2 * (0.5 + 0.5 * 0.8), 2.0], [-(0.5 + 0.5 * down), -(0.5 + 0.5 * 0.8), 0.0]]
    torch.testing.assert_close(token_gradient(advantage="rlsd"), -torch.tensor(expected, dtype=torch.float64))


def test_rlsd_without_mix_is_grpo():
    assert torch.equal(token_gradient(advantage="rlsd", advantage_options={"mix": 0.0}), token_gradient())


def test_opid_by_hand():
    expected = [[2 + 0.01, 2 - 0.2, 2.0], [-1 + 0.01, -1 + 0.3, 0.0]]
    found = token_gradient(advantage="opid", advantage_options={"scale": 0.1})
    torch.testing.assert_close(found, -torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", ["rlsd", "opid"])
def test_teacher_credit_asks_for_the_teacher_and_refuses_to_do_without(name):
    objective = Objective.from_config(advantage=name, **ALONE)
    assert objective.needs_teacher
    batch = replace(inputs(), teacher_logprobs=None)
    with pytest.raises(NumericsError, match="teacher"):
        objective.compute(batch, batch.denominators())


episodes = st.lists(
    st.tuples(
        st.lists(st.floats(-8.0, 8.0), min_size=1, max_size=6), st.floats(-3.0, 3.0), st.sampled_from([0.0, 0.25, 1.0])
    ),
    min_size=1,
    max_size=4,
)


def credit_of(drawn, **options):
    index = [number for number, (gaps, _, _) in enumerate(drawn) for _ in gaps]
    gaps = [gap for values, _, _ in drawn for gap in values]
    return agent_opsd_credit(gaps, index, [a for _, a, _ in drawn], [p for _, _, p in drawn], **options), np.array(
        index
    )


@settings(deadline=None)
@given(episodes, st.floats(0.0, 1.0), st.floats(0.01, 0.99), st.floats(0.0, 1.0))
def test_agent_opsd_stays_in_its_bound_and_keeps_the_sign(drawn, mix, bound, memory):
    credit, index = credit_of(drawn, mix=mix, bound=bound, memory=memory)
    advantage = np.array([a for _, a, _ in drawn])[index]
    assert (np.abs(credit.advantage_N - advantage) <= mix * bound * np.abs(advantage) + 1e-12).all()
    assert (credit.advantage_N * advantage >= 0.0).all()


@settings(deadline=None)
@given(episodes)
def test_agent_opsd_without_mix_is_grpo(drawn):
    credit, index = credit_of(drawn, mix=0.0)
    assert credit.advantage_N.tolist() == np.array([a for _, a, _ in drawn])[index].tolist()


@settings(deadline=None)
@given(episodes)
def test_agent_opsd_beliefs_telescope(drawn):
    credit, index = credit_of(drawn)
    for number, (_, _, rate) in enumerate(drawn):
        rows = index == number
        moved = (credit.belief_N - credit.belief_before_N)[rows].sum()
        assert moved == pytest.approx(credit.belief_N[rows][-1] - np.clip(rate, 0.05, 0.95), abs=1e-12)


@settings(deadline=None)
@given(episodes)
def test_agent_opsd_episodes_do_not_touch_each_other(drawn):
    together, index = credit_of(drawn)
    for number, one in enumerate(drawn):
        assert together.advantage_N[index == number].tolist() == credit_of([one])[0].advantage_N.tolist()


def test_agent_opsd_by_hand_with_a_negative_advantage():
    # e = (log 3, -log 3), prior 1/2: beliefs 3/4 and 1/2, shifts of sign(A): -1/4 and +1/4, z = -1 and 1
    credit = agent_opsd_credit([math.log(3), -math.log(3)], [0, 0], [-2.0], [0.5], bound=0.5, eps=0.0)
    assert credit.belief_N.tolist() == pytest.approx([0.75, 0.5])
    assert credit.weight_N.tolist() == pytest.approx([0.5, 1.5])
    assert credit.advantage_N.tolist() == pytest.approx([-2 * 0.75, -2 * 1.25])


def test_agent_opsd_refuses_impossible_input():
    with pytest.raises(ConfigError):
        agent_opsd_credit([0.0], [0], [1.0], [0.5], bound=1.0)
    with pytest.raises(NumericsError):
        agent_opsd_credit([0.0, 0.0], [1, 0], [1.0, 1.0], [0.5, 0.5])
