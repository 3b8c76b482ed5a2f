"""Packing: every row once, within the budget, in step on all ranks; sampled tokens land where the masks say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError, NumericsError
from stages.packing import TrainRow, mini_batches, pack, plan, split_rows
from stages.schedules import learning_rate

masks = st.lists(st.booleans(), min_size=1, max_size=12).map(lambda rest: [False, *rest])


def row(mask: list[bool], index: int = 0, temperature: float = 1.0) -> TrainRow:
    sampled = np.asarray(mask, np.bool_)
    tokens = np.arange(len(mask), dtype=np.int32) + 100 * (index + 1)
    return TrainRow(
        "rollout", f"row{index}", tokens, sampled, np.zeros(sampled.sum(), np.float32), temperature=temperature
    )


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 200))
@settings(deadline=None)
def test_groups_hold_every_row_once_and_stay_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = split_rows(lengths, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[index] for index in group) <= budget


@given(st.lists(masks, min_size=1, max_size=8), st.integers(4, 60), st.integers(1, 4), st.integers(1, 5))
@settings(deadline=None)
def test_ranks_share_all_rows_and_make_the_same_passes(
    found: list[list[bool]], budget: int, ranks: int, chunk: int
) -> None:
    rows = [row(mask, index, temperature=1.0 if index % 2 else 0.5) for index, mask in enumerate(found)]
    plans = [plan(rows, micro_batch_tokens=budget, ranks=ranks, rank=rank, logits_chunk=chunk) for rank in range(ranks)]
    assert len({len(batches) for batches in plans}) == 1
    assert sorted(index for batches in plans for batch in batches for index in batch.rows) == list(range(len(rows)))
    for peers in zip(*plans, strict=True):
        assert len({batch.chunks for batch in peers}) == 1
        assert all(len(batch.targets) <= batch.chunks * chunk for batch in peers)
        assert all(len({rows[index].temperature for index in batch.rows}) <= 1 for batch in peers)


@given(st.lists(masks, min_size=1, max_size=6))
@settings(deadline=None)
def test_targets_follow_the_place_that_predicts_them_and_slots_keep_their_order(found: list[list[bool]]) -> None:
    rows = [row(mask, index) for index, mask in enumerate(found)]
    batch = pack(rows, range(len(rows)))
    assert np.array_equal(batch.token_ids[batch.batch_index, batch.position + 1], batch.targets)
    compact = np.zeros(batch.mask.shape, np.int64)
    compact[batch.batch_index, batch.slot] = batch.targets
    for place, one in enumerate(rows):
        assert np.array_equal(compact[place, batch.mask[place]], one.targets)
        assert batch.mask[place].sum() == one.sampled_tokens
        assert not batch.mask[place, one.sampled_tokens :].any()


def test_the_filler_of_an_idle_rank_has_no_loss_token() -> None:
    filler = pack([], [])
    assert filler.rows == () and not filler.mask.any() and len(filler.targets) == 1


def test_mini_batches_keep_the_mix_and_depend_on_the_seed_alone() -> None:
    rows = [row([False, True], index) for index in range(10)]
    rows += [replace(row([False, True], index), kind="skill", skill_reward=0.5) for index in range(4)]
    steps = mini_batches(rows, 5, seed=1)
    assert sorted(index for step in steps for index in step) == list(range(14))
    assert [sum(index < 10 for index in step) for step in steps] == [5, 5]
    assert [sum(index >= 10 for index in step) for step in steps] == [2, 2]
    assert mini_batches(rows, 5, seed=1) == steps != mini_batches(rows, 5, seed=2)
    assert mini_batches(rows, None, seed=1) == [list(range(14))]


def test_rows_whose_arrays_do_not_fit_are_refused() -> None:
    good = row([False, True, True])
    with pytest.raises(NumericsError, match="first token"):
        row([True, True])
    with pytest.raises(NumericsError, match="behaviour log-probability"):
        replace(good, behaviour_logprobs=np.zeros(1, np.float32))
    with pytest.raises(NumericsError, match="one to one"):
        replace(good, teacher_token_ids=good.token_ids[::-1].copy(), teacher_sampled=good.sampled)
    with pytest.raises(NumericsError, match="without its mask"):
        replace(good, teacher_token_ids=good.token_ids)


def test_the_teachers_row_has_the_same_targets_and_temperature() -> None:
    good = row([False, True, True], temperature=0.7)
    taught = replace(
        good,
        teacher_token_ids=np.concatenate([[7, 8], good.token_ids]).astype(np.int32),
        teacher_sampled=np.concatenate([[False, False], good.sampled]),
    )
    assert np.array_equal(taught.teacher().targets, good.targets) and taught.teacher().temperature == 0.7
    with pytest.raises(NumericsError, match="without a teacher"):
        good.teacher()


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 8), st.integers(9, 40))
@settings(deadline=None)
def test_learning_rates_rise_to_the_peak_then_never_rise_and_stay_positive(
    schedule: str, warmup: int, total: int
) -> None:
    rates = [
        learning_rate(step, peak=2.0, schedule=schedule, warmup_steps=warmup, total_steps=total)
        for step in range(1, total + 1)
    ]
    peak = max(warmup, 1) - 1
    assert rates[peak] == 2.0 and min(rates) > 0
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_unknown_schedules_and_budgets_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown learning-rate schedule"):
        learning_rate(3, peak=1.0, schedule="step", warmup_steps=0, total_steps=5)
    with pytest.raises(ConfigError, match="micro_batch_tokens"):
        split_rows([1], 0)
