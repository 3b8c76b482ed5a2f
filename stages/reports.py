"""Figures of finished episodes: success with its interval, by type, invalid share, turns, stop reasons. Pure; no files.

An episode that ended in an environment error (`won` null) counts as not won in every success figure here and is counted
separately: leaving it out would make a broken environment look like a better policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Z_95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
ERROR_STOPS = ("env_error", "timeout")


def wilson_interval(wins: int, episodes: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson score interval of a success rate; (0, 1) for no episode.

    centre = (p + z^2 / 2n) / (1 + z^2 / n), half width = z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2).

    >>> [round(bound, 4) for bound in wilson_interval(8, 10)]
    [0.4902, 0.9433]
    >>> wilson_interval(0, 0)
    (0.0, 1.0)
    """
    if episodes == 0:
        return 0.0, 1.0
    rate = wins / episodes
    scale = 1.0 + z * z / episodes
    centre = (rate + z * z / (2 * episodes)) / scale
    half = z / scale * math.sqrt(rate * (1.0 - rate) / episodes + z * z / (4.0 * episodes * episodes))
    # Rounding must not push the bounds of 0 of n and n of n off the ends.
    low = 0.0 if wins == 0 else max(0.0, centre - half)
    high = 1.0 if wins == episodes else min(1.0, centre + half)
    return low, high


@dataclass(frozen=True)
class SuccessRate:
    """Wins among episodes, with the Wilson interval."""

    name: str
    episodes: int
    wins: int
    rate: float
    low: float
    high: float


def success_rate(name: str, wins: int, episodes: int) -> SuccessRate:
    """A rate and its interval; the rate of no episode is NaN."""
    low, high = wilson_interval(wins, episodes)
    return SuccessRate(name, episodes, wins, wins / episodes if episodes else math.nan, low, high)


@dataclass(frozen=True)
class EvaluationReport:
    """What `evaluate` prints: one vote per episode (micro), one vote per task type (macro), and each type alone."""

    micro: SuccessRate
    macro_rate: float
    by_type: tuple[SuccessRate, ...]
    by_label: tuple[SuccessRate, ...]  # named `label=value`, of the tasks that carry the label
    metrics: dict[str, float]  # mean of each metric over all episodes; an episode without it counts as 0
    tasks: int
    attempts: int
    invalid_share: float  # invalid turns / turns
    mean_turns: float
    stop_reasons: dict[str, int]
    failed: tuple[tuple[str, str], ...]  # (task id, error) of episodes that did not count

    def as_summary(self) -> dict[str, Any]:
        """Plain values for a stage's summary; lists of mappings are tables."""
        types = [{"task_type": rate.name, **_rate_figures(rate)} for rate in self.by_type]
        labels = [{"label": rate.name, **_rate_figures(rate)} for rate in self.by_label]
        failed = [{"task_id": task_id, "error": error} for task_id, error in self.failed]
        return {
            **_rate_figures(self.micro),
            "macro_success": self.macro_rate,
            **{f"mean_{name}": value for name, value in self.metrics.items()},
            "tasks": self.tasks,
            "attempts": self.attempts,
            "invalid_share": self.invalid_share,
            "mean_turns": self.mean_turns,
            "stop_reasons": self.stop_reasons,
            "env_errors": len(self.failed),
            "by_type": types,
            **({"by_label": labels} if labels else {}),
            **({"failed": failed} if failed else {}),
        }


def _rate_figures(rate: SuccessRate) -> dict[str, Any]:
    return {
        "success": rate.rate,
        "wilson_low": rate.low,
        "wilson_high": rate.high,
        "won": rate.wins,
        "episodes": rate.episodes,
    }


def evaluation_report(episodes: pa.Table) -> EvaluationReport:
    """The report of rows of `evals`; needs the columns task_id, task_type, won, turns, invalid_turns, stop_reason, error,
    metrics and labels.

    Depends on the set of rows alone, not on their order.
    """
    won = episodes["won"].fill_null(False).to_numpy(zero_copy_only=False).astype(bool)
    by_type = _rates_of(won, [{str(name)} for name in episodes["task_type"].to_pylist()])
    labels = [{f"{name}={value}" for name, value in row or ()} for row in episodes["labels"].to_pylist()]
    tasks = len(pc.unique(episodes["task_id"]))
    uncounted = episodes.filter(pc.is_null(episodes["won"])).select(["task_id", "error"]).to_pylist()
    turns = int(pc.sum(episodes["turns"]).as_py() or 0)
    return EvaluationReport(
        micro=success_rate("all", int(won.sum()), len(won)),
        macro_rate=float(np.mean([entry.rate for entry in by_type])) if by_type else math.nan,
        by_type=by_type,
        by_label=_rates_of(won, labels),
        metrics=_mean_metrics(episodes["metrics"].to_pylist()),
        tasks=tasks,
        attempts=len(won) // tasks if tasks else 0,
        invalid_share=_share(int(pc.sum(episodes["invalid_turns"]).as_py() or 0), turns),
        mean_turns=turns / len(won) if len(won) else math.nan,
        stop_reasons=value_counts(episodes["stop_reason"]),
        failed=tuple(sorted((str(row["task_id"]), str(row["error"])) for row in uncounted)),
    )


def _rates_of(won: np.ndarray, groups: Sequence[set[str]]) -> tuple[SuccessRate, ...]:
    """The success rate of every group, in order of the names; an episode counts in each group it is in."""
    members: dict[str, list[bool]] = {}
    for outcome, names in zip(won, groups, strict=True):
        for name in names:
            members.setdefault(name, []).append(bool(outcome))
    return tuple(success_rate(name, sum(members[name]), len(members[name])) for name in sorted(members))


def _mean_metrics(rows: Sequence[Sequence[tuple[str, float]] | None]) -> dict[str, float]:
    """Mean over all episodes, zero for an episode that lacks the metric: like success, it must not gain by a fault."""
    names = sorted({name for row in rows for name, _ in row or ()})
    return {name: math.fsum(dict(row or ()).get(name, 0.0) for row in rows) / len(rows) for name in names}


def counter_text(counters: Mapping[str, float]) -> str:
    """Counters of an environment on one line; `x_hits` beside `x_misses` becomes a share.

    >>> counter_text({"queries": 12, "cache_hits": 9, "cache_misses": 3})
    'queries 12, cache 9 of 12 hit (75.0 %)'
    """
    parts = []
    for name, value in counters.items():
        stem = name.removesuffix("_hits")
        if name.endswith("_misses") and f"{name.removesuffix('_misses')}_hits" in counters:
            continue
        if name.endswith("_hits") and f"{stem}_misses" in counters:
            asked = value + counters[f"{stem}_misses"]
            share = f" ({value / asked:.1%})".replace("%", " %") if asked else ""
            parts.append(f"{stem} {value:g} of {asked:g} hit{share}")
        else:
            parts.append(f"{name} {value:g}")
    return ", ".join(parts)


def episode_figures(episodes: pa.Table) -> dict[str, Any]:
    """Short figures of `rollouts` or `replays` for the screen.

    Here success is taken over the episodes that count, because gains and advantages are; environment errors are listed.
    """
    counted = episodes["won"].drop_null()
    turns = int(pc.sum(episodes["turns"]).as_py() or 0)
    stops = value_counts(episodes["stop_reason"])
    return {
        "episodes": len(episodes),
        "success": float(np.mean(counted.to_numpy(zero_copy_only=False))) if len(counted) else None,
        "mean_turns": turns / len(episodes) if len(episodes) else None,
        "invalid_share": _share(int(pc.sum(episodes["invalid_turns"]).as_py() or 0), turns),
        "sampled_tokens": int(pc.sum(episodes["sampled_tokens"]).as_py() or 0),
        "env_errors": sum(stops.get(reason, 0) for reason in ERROR_STOPS),
        "stop_reasons": stops,
    }


def value_counts(values: pa.ChunkedArray | Sequence[Any]) -> dict[str, int]:
    """How often each value that is not null occurs, in order of the values."""
    column = values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([pa.array(values, pa.string())])
    pairs = pc.value_counts(column.drop_null()).to_pylist()
    return {str(pair["values"]): int(pair["counts"]) for pair in sorted(pairs, key=lambda pair: str(pair["values"]))}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
