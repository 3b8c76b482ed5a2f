"""The evidence half, the control half, and the trajectory a skill is written from: method section 1, rows 2 and 3.

Pure functions of rollout indices and outcomes. The split looks at the index alone: a split that saw outcomes would put
luck into the gain that the controls are there to measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def evidence_count(group_size: int) -> int:
    """Rollouts of the evidence half, `G // 2`. For odd G the control half has one more: it averages, evidence only picks.

    >>> evidence_count(8), evidence_count(5)
    (4, 2)
    """
    return group_size // 2


def is_control(index: int, group_size: int) -> bool:
    """True for a rollout of the control half: indices from `evidence_count` on.

    >>> [is_control(index, 4) for index in range(4)]
    [False, False, True, True]
    """
    return index >= evidence_count(group_size)


@dataclass(frozen=True)
class Candidate:
    """What the choice may look at: the rollout's index, outcome (None: the episode does not count), turns, valid turns."""

    index: int
    won: bool | None
    turns: int
    valid_turns: int


def choose_evidence(candidates: Sequence[Candidate], group_size: int) -> int | None:
    """Index of the rollout to write the skill from, or None when the evidence half holds no usable episode.

    A success is preferred, the one with the fewest turns; among failures the one with the most valid actions; ties go to
    the lowest index. Control rollouts and episodes that do not count are never chosen.

    >>> rollouts = [Candidate(0, False, 9, 9), Candidate(1, True, 7, 6), Candidate(2, True, 5, 5), Candidate(3, True, 2, 2)]
    >>> choose_evidence(rollouts, 6), choose_evidence(rollouts[:1], 6), choose_evidence(rollouts[3:], 6)
    (2, 0, None)
    """
    usable = [c for c in candidates if not is_control(c.index, group_size) and c.won is not None and c.turns > 0]
    if not usable:
        return None
    won = [c for c in usable if c.won]
    best = min(won, key=lambda c: (c.turns, c.index)) if won else min(usable, key=lambda c: (-c.valid_turns, c.index))
    return best.index
