"""Rewards and group advantages: numbers worked by hand, then properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError, NumericsError
from stages.advantages import episode_rewards, group_advantages


def test_rewards_by_hand_household_and_search():
    assert episode_rewards([1, 0, 1], [0, 3, 2]).tolist() == pytest.approx([10.0, -0.3, 9.8])
    assert episode_rewards([0.5], [2], success_reward=1.0, invalid_penalty=0.01).tolist() == pytest.approx([0.48])


def test_reward_refuses_a_score_that_is_not_finite():
    with pytest.raises(NumericsError):
        episode_rewards([np.nan], [0])


def test_advantages_by_hand_with_sample_standard_deviation():
    found = group_advantages([10.0, 10.0, 0.0, 0.0], [0, 0, 0, 0], eps=0.0)  # std = sqrt(100 / 3)
    assert found.std_Q[0] == pytest.approx(np.sqrt(100 / 3))
    assert found.advantage_R.tolist() == pytest.approx([0.75**0.5, 0.75**0.5, -(0.75**0.5), -(0.75**0.5)])


def test_eps_is_added_to_the_standard_deviation():
    found = group_advantages([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], eps=0.5)  # std = 1/2
    assert found.advantage_R.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_advantages_without_normalisation_are_differences_from_the_mean():
    assert group_advantages([10.0, 0.0], [0, 0], norm="none").advantage_R.tolist() == [5.0, -5.0]


@pytest.mark.parametrize("reward", [0.35, 0.1 + 0.2, -0.7, 0.0, 1e6 / 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_group_without_spread_gives_exactly_zero(reward, dtype):
    found = group_advantages(np.full(8, reward, dtype), np.zeros(8, int), eps=0.0)
    assert (found.advantage_R == 0.0).all() and found.std_Q[0] == 0.0 and found.zero_variance_Q[0]


def test_rounding_noise_is_not_taken_for_spread():
    found = group_advantages([0.3, 0.1 + 0.2, 0.3, 0.1 * 3], [0] * 4, eps=0.0)
    assert (found.advantage_R == 0.0).all() and found.zero_variance_Q[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_seven_against_one_stays_moderate_in_any_input_type(dtype):
    rewards = np.full(8, 0.35, dtype)
    rewards[3] = 1.0
    advantage = group_advantages(rewards, np.zeros(8, int), eps=0.0).advantage_R
    # (x - mean) / std for one of eight: 7/8 / sqrt(1/8) and -1/8 / sqrt(1/8), whatever the two rewards are
    assert advantage[3] == pytest.approx(7 / 8 * 8**0.5, rel=1e-6)
    assert advantage[0] == pytest.approx(-(8**0.5) / 8, rel=1e-6)


def test_rows_weigh_a_rollout_by_its_turns_and_rollouts_do_not():
    reward, group = [1.0, 0.0], [0, 0]
    assert group_advantages(reward, group, norm="none").mean_Q.tolist() == [0.5]
    weighted = group_advantages(reward, group, group_stats="rows", turns=[1, 3], eps=0.0)
    expanded = np.array([1.0, 0.0, 0.0, 0.0])
    assert weighted.mean_Q.tolist() == [0.25]
    assert weighted.std_Q[0] == pytest.approx(expanded.std(ddof=1))
    assert weighted.advantage_R.tolist() == pytest.approx([0.75 / 0.5, -0.25 / 0.5])


def test_a_group_of_one_is_an_error_that_names_the_group():
    with pytest.raises(NumericsError, match="group 1"):
        group_advantages([1.0, 0.0, 1.0], [0, 0, 1])


@pytest.mark.parametrize("options", [{"norm": "rms"}, {"group_stats": "tokens"}, {"group_stats": "rows"}])
def test_unknown_options_are_refused(options):
    with pytest.raises(ConfigError):
        group_advantages([1.0, 0.0], [0, 0], **options)


groups = st.lists(st.lists(st.floats(-5.0, 10.0), min_size=2, max_size=8), min_size=1, max_size=4)


def flat(rewards):
    index = [group for group, values in enumerate(rewards) for _ in values]
    return np.array([value for values in rewards for value in values]), np.array(index)


@settings(deadline=None)
@given(groups, st.randoms(), st.sampled_from(["std", "none"]))
def test_advantages_do_not_depend_on_row_order_to_the_last_bit(rewards, random, norm):
    reward, group = flat(rewards)
    order = list(range(len(reward)))
    random.shuffle(order)
    whole = group_advantages(reward, group, norm=norm).advantage_R
    assert whole[order].tolist() == group_advantages(reward[order], group[order], norm=norm).advantage_R.tolist()


@settings(deadline=None)
@given(groups)
def test_advantages_of_a_group_sum_to_zero_and_ignore_other_groups(rewards):
    reward, group = flat(rewards)
    whole = group_advantages(reward, group).advantage_R
    for index, values in enumerate(rewards):
        alone = group_advantages(values, [0] * len(values)).advantage_R
        assert whole[group == index].tolist() == alone.tolist()
        assert alone.sum() == pytest.approx(0.0, abs=1e-7)


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 10.0, 9.9, -0.2]), min_size=2, max_size=8), st.floats(-50.0, 50.0))
def test_advantages_ignore_a_constant_added_to_every_reward(rewards, shift):
    zeros = [0] * len(rewards)
    shifted = group_advantages(np.array(rewards) + shift, zeros).advantage_R
    np.testing.assert_allclose(shifted, group_advantages(rewards, zeros).advantage_R, atol=1e-9)
