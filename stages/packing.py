"""Rows of training tokens, and how they become padded micro-batches: pure numpy, no tensor library.

A row is one token sequence with a mask of the tokens that the policy sampled; only those carry loss. A micro-batch pads
its rows to one length; the loss tokens of a row are kept in a second, compact layout `(B, S)`, S = most sampled tokens of
a row, because no logits are ever needed elsewhere. How rows are split into micro-batches and ranks changes no loss:
everything is divided by global denominators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data.seeds import derive_seed
from schemas.errors import ConfigError, NumericsError

RowKind = Literal["rollout", "skill", "example"]


@dataclass(frozen=True, eq=False)
class TrainRow:
    """One sequence to train on.

    `token_ids` `(L,)` int32 and `sampled` `(L,)` bool; the first token is never sampled, since nothing predicts it.
    `behaviour_logprobs` `(n,)` float32, one per sampled token, as the engine recorded them at the sampling `temperature`
    (NaN where it recorded none). `advantage` A and `trust` omega_q of a rollout row; `skill_reward` r_q of a skill row.
    `teacher_token_ids` and `teacher_sampled` hold the same sampled tokens after a prompt with the task's skill, or None
    where there is no teacher. Raises NumericsError when the arrays do not fit together.
    """

    kind: RowKind
    row_id: str
    token_ids: NDArray[np.int32]
    sampled: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    advantage: float = 0.0
    trust: float = 1.0
    skill_reward: float | None = None
    temperature: float = 1.0
    teacher_token_ids: NDArray[np.int32] | None = None
    teacher_sampled: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        _check_tokens(self.row_id, self.token_ids, self.sampled)
        if len(self.behaviour_logprobs) != self.sampled_tokens:
            raise NumericsError(
                "a row needs one behaviour log-probability for each sampled token",
                where=self.row_id,
                expected=self.sampled_tokens,
                found=len(self.behaviour_logprobs),
            )
        if self.teacher_token_ids is None:
            return
        if self.teacher_sampled is None:
            raise NumericsError("a teacher sequence without its mask", where=self.row_id)
        _check_tokens(f"{self.row_id}, teacher", self.teacher_token_ids, self.teacher_sampled)
        if not np.array_equal(self.targets, self.teacher_token_ids[self.teacher_sampled]):
            raise NumericsError(
                "teacher and student do not share their sampled tokens one to one",
                where=self.row_id,
                remedy="check that the environment's prompts insert the skill and change nothing else",
            )

    @property
    def sampled_tokens(self) -> int:
        return int(self.sampled.sum())

    @property
    def targets(self) -> NDArray[np.int32]:
        """The sampled tokens in order, `(n,)`."""
        return self.token_ids[self.sampled]

    def teacher(self) -> TrainRow:
        """The row as the teacher reads it: same sampled tokens, skill in the prompt."""
        if self.teacher_token_ids is None or self.teacher_sampled is None:
            raise NumericsError("a row without a teacher sequence", where=self.row_id)
        return TrainRow(
            self.kind,
            self.row_id,
            self.teacher_token_ids,
            self.teacher_sampled,
            self.behaviour_logprobs,
            temperature=self.temperature,
        )


def _check_tokens(where: str, token_ids: NDArray[np.int32], sampled: NDArray[np.bool_]) -> None:
    if token_ids.ndim != 1 or token_ids.shape != sampled.shape or sampled.dtype != np.bool_:
        raise NumericsError(
            "tokens and mask of a row do not fit",
            where=where,
            expected=f"bool mask of shape {token_ids.shape}",
            found=f"{sampled.dtype} of shape {sampled.shape}",
        )
    if len(sampled) and bool(sampled[0]):
        raise NumericsError("the first token of a row cannot be a sampled one", where=where)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Padded rows of one forward pass.

    `rows` `(B,)` are positions in the list that was packed, empty for the filler that keeps ranks in step. `token_ids`
    `(B, L)` is padded on the right with 0: causal attention never looks there. Sampled token i of the batch is
    `targets[i]`, predicted at `(batch_index[i], position[i])` and stored at `(batch_index[i], slot[i])` of the compact
    `(B, S)` layout; `mask` `(B, S)` marks the slots in use. All rows were sampled at one `temperature`. `chunks` is in how
    many pieces the output head is applied, the same on every rank.
    """

    rows: tuple[int, ...]
    token_ids: NDArray[np.int64]
    batch_index: NDArray[np.int64]
    position: NDArray[np.int64]
    slot: NDArray[np.int64]
    targets: NDArray[np.int64]
    mask: NDArray[np.bool_]
    temperature: float = 1.0
    chunks: int = 1


def split_rows(lengths: Sequence[int], micro_batch_tokens: int) -> list[list[int]]:
    """Row positions grouped so that rows x longest row stays within `micro_batch_tokens`.

    Rows are taken longest first, ties by position, so groups depend on the lengths alone. A row longer than the budget is
    a group of its own: refusing it in the middle of a run would help nobody. Raises ConfigError for a budget below 1.

    >>> split_rows([3, 9, 4, 4], 8)
    [[1], [2, 3], [0]]
    """
    if micro_batch_tokens < 1:
        raise ConfigError("learner.micro_batch_tokens out of range", expected=">= 1", found=micro_batch_tokens)
    groups: list[list[int]] = []
    width = 0
    for row in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if groups and width * (len(groups[-1]) + 1) <= micro_batch_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
            width = max(1, lengths[row])
    return groups


def pack(rows: Sequence[TrainRow], group: Sequence[int], *, chunks: int = 1) -> MicroBatch:
    """The rows at `group` as one micro-batch; an empty group gives the filler, one row of two tokens and one target."""
    if not group:
        zero = np.zeros(1, np.int64)
        return MicroBatch(
            (), np.zeros((1, 2), np.int64), zero, zero, zero, zero, np.zeros((1, 1), np.bool_), chunks=chunks
        )
    chosen = [rows[index] for index in group]
    token_ids = np.zeros((len(chosen), max(len(row.token_ids) for row in chosen)), np.int64)
    mask = np.zeros((len(chosen), max(1, max(row.sampled_tokens for row in chosen))), np.bool_)
    batch_index, position, slot, targets = [], [], [], []
    for place, row in enumerate(chosen):
        token_ids[place, : len(row.token_ids)] = row.token_ids
        found = np.flatnonzero(row.sampled)
        mask[place, : len(found)] = True
        batch_index.append(np.full(len(found), place, np.int64))
        position.append(found - 1)  # the place that predicts the token
        slot.append(np.arange(len(found), dtype=np.int64))
        targets.append(row.targets.astype(np.int64))
    return MicroBatch(
        tuple(group),
        token_ids,
        np.concatenate(batch_index),
        np.concatenate(position),
        np.concatenate(slot),
        np.concatenate(targets),
        mask,
        chosen[0].temperature,
        chunks,
    )


def plan(
    rows: Sequence[TrainRow], *, micro_batch_tokens: int, ranks: int, rank: int, logits_chunk: int
) -> list[MicroBatch]:
    """The micro-batches of one rank. Every rank gets the same number, and the same `chunks` at the same place.

    Under ZeRO-3 every forward and backward pass, and every use of the output head, is a collective operation: a rank
    with one fewer would leave the others waiting. Groups are dealt out in order of length, so ranks also do equal work.
    """
    groups: list[list[int]] = []
    for temperature in sorted({row.temperature for row in rows}):
        places = [place for place, row in enumerate(rows) if row.temperature == temperature]
        split = split_rows([len(rows[place].token_ids) for place in places], micro_batch_tokens)
        groups += [[places[index] for index in group] for group in split]
    groups += [[] for _ in range(-len(groups) % ranks)]
    batches = []
    for start in range(0, len(groups), ranks):
        peers = groups[start : start + ranks]
        most = max(1, max(sum(rows[row].sampled_tokens for row in group) for group in peers))
        batches.append(pack(rows, peers[rank], chunks=-(-most // logits_chunk)))
    return batches


def mini_batches(rows: Sequence[TrainRow], minibatch_rows: int | None, seed: int) -> list[list[int]]:
    """Row positions of each optimiser step of an iteration; every step keeps the mix of kinds (method section 3).

    `minibatch_rows` counts rollout rows; None is one step over everything. Rows are shuffled by `seed`, then each kind
    is dealt out evenly, so sizes differ by one row at most. Positions are sorted within a step.
    """
    main = [index for index, row in enumerate(rows) if row.kind != "skill"]
    skills = [index for index, row in enumerate(rows) if row.kind == "skill"]
    if minibatch_rows is None or len(main) <= minibatch_rows:
        return [list(range(len(rows)))] if rows else []
    steps = -(-len(main) // minibatch_rows)
    dealt: list[list[int]] = [[] for _ in range(steps)]
    for kind, indices in (("main", main), ("skill", skills)):
        order = np.random.default_rng(derive_seed(seed, "minibatch", kind)).permutation(len(indices))
        for place, index in enumerate(order):
            dealt[place % steps].append(indices[index])
    return [sorted(step) for step in dealt]
