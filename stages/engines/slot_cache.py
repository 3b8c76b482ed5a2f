"""The key-value cache of the engine: one slot per sequence, kept over the turns of a session.

A pool holds keys and values of every layer for many sequences, each with its own length. Rows that decode together lie in
neighbouring slots, so that attention reads a view of the pool and nothing is copied per token; rows that are done are
swapped out of that range. A session's slot keeps its tokens between calls: the next prompt that extends them is prefilled
from where they end. Slots of sessions that are no longer used are reused, oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

CAPACITY_STEP = 128  # positions a slot grows by, at least
IDLE_CALLS = 4  # calls without use after which a session's slot may be given to another


@dataclass
class Slot:
    """Who owns a slot, which token ids its keys and values stand for, and when it was last used."""

    owner: str | None = None
    tokens: list[int] = field(default_factory=list)
    busy: bool = False
    last_used: int = -1


@dataclass(frozen=True)
class Step:
    """What one forward pass writes and reads. `source` is (rows, query index) of each written token, None when decoding
    (every row writes its only token); `slots` and `positions` say where each goes; `view` is what attention reads."""

    source: tuple[torch.Tensor, torch.Tensor] | None
    slots: torch.Tensor
    positions: torch.Tensor
    view: slice | torch.Tensor
    width: int


class SlotPool:
    """Keys and values as one tensor (layers, 2, slots, heads, capacity, head size), and the owners of the slots."""

    def __init__(
        self, layers: int, heads: int, head_size: int, *, dtype: torch.dtype, device: torch.device, budget_bytes: int
    ) -> None:
        self.data = torch.zeros((layers, 2, 0, heads, 0, head_size), dtype=dtype, device=device)
        self.slots: list[Slot] = []
        self.sessions: dict[str, int] = {}
        self.clock = 0
        self.budget_bytes = budget_bytes
        self.step: Step | None = None
        self._cache = Cache(layers=[SlotLayer(self, index) for index in range(layers)])

    @property
    def cache(self) -> Cache:
        """The pool as transformers' models see it; `step` must be set before each forward pass."""
        return self._cache

    @property
    def capacity(self) -> int:
        return self.data.shape[4]

    def rows_within_budget(self, length: int) -> int:
        """Slots of `length` positions that the memory budget holds; at least one."""
        return max(1, self.budget_bytes // max(1, self._bytes_per_position() * _rounded(length)))

    def clear(self) -> None:
        """Forget every session; the memory is given back."""
        layers, two, _, heads, _, head_size = self.data.shape
        self.data = self.data.new_zeros((layers, two, 0, heads, 0, head_size))
        self.slots, self.sessions = [], {}

    def begin_call(self) -> None:
        """Count one more call of the engine; idleness of sessions is measured in calls."""
        self.clock += 1

    def reserve(self, sessions: Sequence[str | None], length: int) -> list[int]:
        """One busy slot of at least `length` positions for each of `sessions` (None: a slot that no session keeps).

        Known sessions get the slot that holds their tokens. Memory beyond the budget is used only when the call itself
        needs it.
        """
        for name in sessions:
            if name is not None and name in self.sessions:
                self.slots[self.sessions[name]].busy = True
        capacity = self.capacity if length <= self.capacity else max(_rounded(length), _rounded(self.capacity * 3 // 2))
        if self._over_budget(len(self.slots), capacity):
            capacity = max(self.capacity, _rounded(length))
        missing = sum(name is None or name not in self.sessions for name in sessions)
        spare = self._reusable(missing, idle_calls=IDLE_CALLS)
        total = len(self.slots) + missing - len(spare)
        if self._over_budget(total, capacity):
            spare = self._reusable(missing, idle_calls=0)
            total = len(self.slots) + missing - len(spare)
            if self._over_budget(total, capacity):
                self._keep_busy_only()
                spare, total = [], len(self.slots) + missing
        spare += range(len(self.slots), total)
        self._resize(total, capacity)
        return [self._take(name, spare) for name in sessions]

    def release(self, slot: int, tokens: list[int]) -> None:
        """The sequence of `slot` is done for now; `tokens` are those whose keys and values the slot holds."""
        entry = self.slots[slot]
        entry.busy = False
        entry.tokens = tokens if entry.owner is not None else []

    def gather(self, slots: list[int]) -> tuple[int, list[int]]:
        """Bring the contents of `slots` into neighbouring slots; returns the first of these and where each row now is."""
        count = len(slots)
        start = max(0, min(min(slots), len(self.slots) - count))
        inside = range(start, start + count)
        holes = sorted(set(inside) - set(slots))
        moves = [(slot, holes.pop()) for slot in sorted(slots) if slot not in inside]
        self.swap(moves)
        moved = dict(moves)
        return start, [moved.get(slot, slot) for slot in slots]

    def swap(self, pairs: Sequence[tuple[int, int]], width: int | None = None) -> None:
        """Exchange the contents of each pair of slots, the first `width` positions of them (default: all in use)."""
        if not pairs:
            return
        there = torch.tensor([a for a, b in pairs] + [b for a, b in pairs], device=self.data.device)
        here = torch.tensor([b for a, b in pairs] + [a for a, b in pairs], device=self.data.device)
        used = max(len(self.slots[slot].tokens) for pair in pairs for slot in pair)
        view = self.data[..., : max(used, width or 0), :]
        view.index_copy_(2, there, view.index_select(2, here))
        for a, b in pairs:
            self.slots[a], self.slots[b] = self.slots[b], self.slots[a]
        for slot in {slot for pair in pairs for slot in pair}:
            owner = self.slots[slot].owner
            if owner is not None:
                self.sessions[owner] = slot

    def copy(self, source: int, targets: Sequence[int], width: int) -> None:
        """Copy the first `width` positions of a slot into others."""
        self.data[:, :, list(targets), :, :width] = self.data[:, :, source : source + 1, :, :width]

    def _take(self, name: str | None, spare: list[int]) -> int:
        if name is not None and name in self.sessions:
            slot = self.sessions[name]
        else:
            slot = spare.pop(0)
            entry = self.slots[slot]
            if entry.owner is not None:
                del self.sessions[entry.owner]
            entry.owner, entry.tokens = name, []
            if name is not None:
                self.sessions[name] = slot
        self.slots[slot].busy = True
        self.slots[slot].last_used = self.clock
        return slot

    def _reusable(self, count: int, idle_calls: int) -> list[int]:
        """Up to `count` slots to hand out again: those without an owner, then idle sessions, the longest unused first."""
        idle = [
            (entry.owner is not None, entry.last_used, slot)
            for slot, entry in enumerate(self.slots)
            if not entry.busy and (entry.owner is None or self.clock - entry.last_used > idle_calls)
        ]
        return sorted(slot for _, _, slot in sorted(idle)[:count])

    def _keep_busy_only(self) -> None:
        kept = [slot for slot, entry in enumerate(self.slots) if entry.busy]
        self.data = self.data[:, :, kept].clone()
        self.slots = [self.slots[slot] for slot in kept]
        self.sessions = {entry.owner: slot for slot, entry in enumerate(self.slots) if entry.owner is not None}

    def _resize(self, slots: int, capacity: int) -> None:
        layers, two, old_slots, heads, old_capacity, head_size = self.data.shape
        if slots == old_slots and capacity == old_capacity:
            return
        grown = self.data.new_zeros((layers, two, slots, heads, capacity, head_size))
        grown[:, :, :old_slots, :, :old_capacity] = self.data
        self.data = grown
        self.slots += [Slot() for _ in range(slots - old_slots)]

    def _bytes_per_position(self) -> int:
        layers, two, _, heads, _, head_size = self.data.shape
        return layers * two * heads * head_size * self.data.element_size()

    def _over_budget(self, slots: int, capacity: int) -> bool:
        return slots * capacity * self._bytes_per_position() > self.budget_bytes


class SlotLayer(CacheLayerMixin):
    """One layer's face of the pool, as transformers' attention modules call it."""

    def __init__(self, pool: SlotPool, index: int) -> None:
        super().__init__()
        self.pool, self.index = pool, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is lazy: the pool allocates."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values (rows, heads, queries, head size); return those that attention reads."""
        step = self.pool.step
        assert step is not None, "the pool's step is set before every forward pass"
        views = []
        for part, states in zip(self.pool.data[self.index], (key_states, value_states), strict=True):
            new = states[:, :, 0] if step.source is None else states[step.source[0], :, step.source[1]]
            part[step.slots, :, step.positions] = new  # (written tokens, heads, head size)
            views.append(part[step.view, :, : step.width])
        return views[0], views[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._width(), 0

    def get_seq_length(self) -> int:
        return self._width()

    def get_max_length(self) -> int:
        return -1

    def _width(self) -> int:
        return self.pool.step.width if self.pool.step is not None else 0


def _rounded(length: int) -> int:
    return -(-length // CAPACITY_STEP) * CAPACITY_STEP
