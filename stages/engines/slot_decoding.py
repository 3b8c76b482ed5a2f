"""Decoding with the slot pool: prefill only what a session has not seen, then one token per live row and pass."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from stages.engines.reply import Reply
from stages.engines.slot_cache import SlotPool, Step

PREFILL_TOKENS = 8192  # padded tokens of one prefill pass
PREFILL_MASK_ELEMENTS = 2**26  # of one attention mask
COMPACT_SHARE = 0.125  # finished rows are swapped out once they make up this share of the batch


class SlotDecoder:
    """A `Decoder` for models whose every layer attends to the whole sequence."""

    def __init__(self, module: torch.nn.Module, pool: SlotPool) -> None:
        self.module, self.pool = module, pool
        self._cache_argument = cache_argument(module)
        self._start = 0
        self._rows: list[Reply] = []  # row i of the batch lies in slot _start + i; may include finished ones

    def rows_at_once(self, longest: int) -> int:
        return self.pool.rows_within_budget(longest)

    def clear(self) -> None:
        self.pool.clear()

    def begin_call(self) -> None:
        self.pool.begin_call()

    def start(self, replies: list[Reply]) -> torch.Tensor:
        """See `Decoder.start`. Ids that a session's slot already holds are not computed again."""
        slots = self.pool.reserve([reply.request.session for reply in replies], max(r.longest for r in replies))
        self._start, slots = self.pool.gather(slots)
        for reply, slot in zip(replies, slots, strict=True):
            reply.slot = slot
            reply.stored = min(_common_prefix(self.pool.slots[slot].tokens, reply.ids), reply.prompt_length - 1)
        self._rows = sorted(replies, key=lambda reply: reply.slot)
        logits: dict[int, torch.Tensor] = {}
        first, twins = _same_prompts(replies)
        for group in _prefill_groups(first):
            logits.update(zip((reply.slot for reply in group), self._prefill(group), strict=True))
        for reply, others in twins:
            self.pool.copy(reply.slot, [other.slot for other in others], reply.prompt_length)
            logits.update((other.slot, logits[reply.slot]) for other in others)
        return torch.stack([logits[reply.slot] for reply in replies])

    def step(self, live: list[Reply]) -> torch.Tensor:
        """See `Decoder.step`."""
        if len(live) <= (1 - COMPACT_SHARE) * len(self._rows):
            self._compact(live)
        rows, device = self._rows, self.pool.data.device
        positions = torch.tensor([len(reply.ids) - 1 for reply in rows], device=device)
        end = self._start + len(rows)
        width = max(len(reply.ids) for reply in rows)
        self.pool.step = Step(
            source=None,
            slots=torch.arange(self._start, end, device=device),
            positions=positions,
            view=slice(self._start, end),
            width=width,
        )
        ids = torch.tensor([[reply.ids[-1]] for reply in rows], device=device)
        logits = self._forward(ids, positions[:, None], width)
        if len(live) == len(rows) and all(a is b for a, b in zip(live, rows, strict=True)):
            return logits
        return logits[torch.tensor([reply.slot - self._start for reply in live], device=device)]

    def finish(self, replies: list[Reply]) -> None:
        """See `Decoder.finish`. The last sampled id was never fed, so its keys and values are not stored."""
        for reply in replies:
            self.pool.release(reply.slot, reply.ids[:-1])
        self._rows = []

    def _compact(self, live: list[Reply]) -> None:
        """Swap live rows into the front of the range and leave the finished ones behind."""
        count = len(live)
        behind = [reply for reply in live if reply.slot >= self._start + count]
        finished = [reply for reply in self._rows if reply.stop_reason is not None and reply.slot < self._start + count]
        pairs = [(a.slot, b.slot) for a, b in zip(behind, finished, strict=True)]
        self.pool.swap(pairs, width=max(len(reply.ids) for reply in self._rows))
        for a, b in zip(behind, finished, strict=True):
            a.slot, b.slot = b.slot, a.slot
        self._rows = sorted(live, key=lambda reply: reply.slot)

    def _prefill(self, group: list[Reply]) -> torch.Tensor:
        """Next-token logits (group, vocabulary) after the ids that are not stored yet; left-padded, so that the last query
        of every row is its last id. Padding is neither written nor read: its queries look at position 0 and are dropped."""
        device = self.pool.data.device
        pending = [reply.ids[reply.stored :] for reply in group]
        queries = max(len(ids) for ids in pending)
        pads = torch.tensor([queries - len(ids) for ids in pending], device=device)
        stored = torch.tensor([reply.stored for reply in group], device=device)
        ids = torch.tensor([[0] * (queries - len(ids)) + ids for ids in pending], device=device)
        offsets = torch.arange(queries, device=device)[None, :] - pads[:, None]
        positions = (stored[:, None] + offsets).clamp_(min=0)
        written = torch.nonzero(offsets >= 0, as_tuple=True)
        slots = torch.tensor([reply.slot for reply in group], device=device)
        width = max(len(reply.ids) for reply in group)
        self.pool.step = Step(
            source=written, slots=slots[written[0]], positions=positions[written], view=slots, width=width
        )
        return self._forward(ids, positions, width)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
        """Logits (rows, vocabulary) of the last query. Query at position p sees positions 0 to p of its own slot."""
        hidden = torch.arange(width, device=ids.device)[None, None, :] > positions[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.pool.data.dtype, device=ids.device).masked_fill_(hidden, -torch.inf)
        output = self.module(
            input_ids=ids,
            attention_mask=mask[:, None],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self.pool.cache},
        )
        return output.logits[:, -1]


def cache_argument(module: torch.nn.Module) -> str:
    """What this version of transformers calls the cache in `forward`."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    if left == right[: len(left)]:
        return len(left)
    return next(index for index, (a, b) in enumerate(zip([*left, None], [*right, None], strict=False)) if a != b)


def _same_prompts(replies: list[Reply]) -> tuple[list[Reply], list[tuple[Reply, list[Reply]]]]:
    """Replies to prefill, and for each the others that start with nothing stored and the very same prompt."""
    by_prompt: dict[tuple[int, ...], list[Reply]] = {}
    first = []
    for reply in replies:
        if reply.stored:
            first.append(reply)
            continue
        same = by_prompt.setdefault(tuple(reply.ids), [])
        if not same:
            first.append(reply)
        same.append(reply)
    return first, [(same[0], same[1:]) for same in by_prompt.values() if len(same) > 1]


def _prefill_groups(replies: list[Reply]) -> list[list[Reply]]:
    """Replies with similar numbers of ids to compute, in groups that keep a pass within its bounds."""
    groups: list[list[Reply]] = []
    shortest = widest = 0
    for reply in sorted(replies, key=lambda reply: (len(reply.ids) - reply.stored, reply.index)):
        pending = len(reply.ids) - reply.stored
        widest = max(widest, len(reply.ids))
        tokens = (len(groups[-1]) + 1) * pending if groups else 0
        bounded = tokens <= PREFILL_TOKENS and tokens * widest <= PREFILL_MASK_ELEMENTS
        if groups and bounded and pending <= 16 + shortest * 3 // 2:
            groups[-1].append(reply)
        else:
            groups.append([reply])
            shortest, widest = pending, len(reply.ids)
    return groups
