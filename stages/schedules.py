"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from schemas.errors import ConfigError


def learning_rate(step: int, *, peak: float, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """Learning rate of `step` (1-based, 1..total_steps): linear warm-up to `peak`, then the schedule.

    `constant` stays at the peak; `linear` and `cosine` fall from the peak, reached at the end of the warm-up, towards 0
    at `total_steps + 1`, so that the last step still moves. Steps beyond `total_steps` keep the last step's rate. Raises
    ConfigError for an unknown schedule or a step below 1.

    >>> [learning_rate(s, peak=1.0, schedule="linear", warmup_steps=2, total_steps=5) for s in (1, 2, 3, 5)]
    [0.5, 1.0, 0.75, 0.25]
    >>> round(learning_rate(3, peak=1.0, schedule="cosine", warmup_steps=0, total_steps=3), 4)
    0.25
    """
    if step < 1:
        raise ConfigError("step of the learning-rate schedule out of range", expected=">= 1", found=step)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    first = max(1, warmup_steps)  # the step that runs at the peak
    span = max(1, total_steps + 1 - first)
    progress = min(step, max(total_steps, first)) - first
    if schedule == "linear":
        return peak * (1.0 - progress / span)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * progress / span))
    raise ConfigError("unknown learning-rate schedule", expected="constant, cosine or linear", found=schedule)
