"""Statistics of each task type, carried from step to step, and the shrinkage they drive: method section 2.

Pure numpy in float64: no files, no configuration object. "Unknown" is NaN here and null in tables. `Statistics` turns into
plain scalars (`as_rows`) and back without losing a bit, so that a stopped run continues with the same numbers.

Choices where the method's text is open, all ours [O]:

- a step's own gains enter the statistics that shrink them: `update_statistics` first, then `shrink`;
- within-task variance is pooled by degrees of freedom, sum of squared deviations / sum of (n - 1): a task with a single
  episode on a side adds nothing there. A step without any degree of freedom leaves the moving average as it was; a type
  that never had one takes the all-type value, then the other side's value; failing all, the noise is unknown and B = 0,
  because nothing shows that a deviation is more than noise;
- each moving average counts its own updates t for the bias correction, since a variance may skip a step;
- the mean of s_q^2 that is taken from d_c is a moving average over the same steps as d_c;
- a task without a gain (no usable skill, other start state, no valid episode on a side) enters no statistic;
- in the step of its first appearance a type uses the all-type statistics (its own gains are part of them) while its own
  averages start.

Axis suffix: `_Q` tasks of one step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ConfigError
from stages.estimators import (
    FloatArray,
    IntArray,
    TaskMoments,
    gain_noise,
    grouped_sums,
    shrinkage_factor,
    shrunk_gain,
)

ALL_TYPES = "*"  # name of the all-type statistics where rows of statistics are listed


@dataclass(frozen=True, slots=True)
class MovingAverage:
    """An exponential moving average before bias correction: the raw accumulator and the number t of updates."""

    raw: float = 0.0
    steps: int = 0

    def updated(self, value: float, decay: float) -> MovingAverage:
        """`raw <- rho * raw + (1 - rho) * value`; a value of NaN leaves everything as it was."""
        if math.isnan(value):
            return self
        return MovingAverage(decay * self.raw + (1.0 - decay) * value, self.steps + 1)

    def value(self, decay: float) -> float:
        """The corrected average, `raw / (1 - rho^t)`; NaN before the first update.

        >>> round(MovingAverage().updated(1.0, 0.9).updated(3.0, 0.9).value(0.9), 6)  # (0.09 + 0.3) / 0.19
        2.052632
        """
        if self.steps == 0:
            return math.nan
        # expm1 keeps the digits of 1 - rho^t for a decay near 1.
        return self.raw / (1.0 if decay == 0.0 else -math.expm1(self.steps * math.log(decay)))


@dataclass(frozen=True, slots=True)
class TypeStatistics:
    """What one task type carries from step to step (method section 2); `steps` counts steps with a scored task."""

    steps: int = 0
    gain: MovingAverage = field(default_factory=MovingAverage)  # m_c
    replay_variance: MovingAverage = field(default_factory=MovingAverage)  # v_rep,c
    control_variance: MovingAverage = field(default_factory=MovingAverage)  # v_ctl,c
    squared_deviation: MovingAverage = field(default_factory=MovingAverage)  # d_c
    noise: MovingAverage = field(default_factory=MovingAverage)  # mean of s_q^2

    def between_variance(self, decay: float) -> float:
        """tau_c^2 = max(0, d_c - mean s_q^2); NaN while either is unknown."""
        between = self.squared_deviation.value(decay) - self.noise.value(decay)
        return math.nan if math.isnan(between) else max(0.0, between)

    def as_row(self) -> dict[str, float | int]:
        """Plain scalars for one table row: `steps`, then `<name>_raw` and `<name>_steps` of each average."""
        row: dict[str, float | int] = {"steps": self.steps}
        for name, average in asdict(self).items():
            if isinstance(average, dict):
                row |= {f"{name}_raw": average["raw"], f"{name}_steps": average["steps"]}
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, float | int]) -> TypeStatistics:
        """Inverse of `as_row`, exact to the last bit; other columns of the row are ignored."""
        names = [name for name in cls.__dataclass_fields__ if name != "steps"]
        averages = {name: MovingAverage(float(row[f"{name}_raw"]), int(row[f"{name}_steps"])) for name in names}
        return cls(steps=int(row["steps"]), **averages)


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of every type seen so far, and of all types together."""

    by_type: Mapping[str, TypeStatistics] = field(default_factory=dict)
    all_types: TypeStatistics = field(default_factory=TypeStatistics)

    def of(self, task_type: str) -> TypeStatistics:
        """The statistics of a type, empty ones if it was never seen."""
        return self.by_type.get(task_type, TypeStatistics())

    def as_rows(self) -> list[dict[str, float | int | str]]:
        """One row a type in order of its name, the all-type row (`ALL_TYPES`) first."""
        rows = [{"task_type": ALL_TYPES} | self.all_types.as_row()]
        return rows + [{"task_type": name} | self.by_type[name].as_row() for name in sorted(self.by_type)]

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, float | int | str]]) -> Statistics:
        """Inverse of `as_rows`, in any order of rows."""
        found = {str(row["task_type"]): TypeStatistics.from_row(row) for row in rows}  # type: ignore[arg-type]
        return cls(all_types=found.pop(ALL_TYPES, TypeStatistics()), by_type=found)


@dataclass(frozen=True, slots=True)
class TaskGains:
    """The gains of one step: what `update_statistics` and `shrink` need to know of each task, all `(Q,)`."""

    gain_Q: FloatArray  # g_q, NaN where not scored
    replays: TaskMoments
    controls: TaskMoments
    type_Q: IntArray  # index into type_names
    type_names: tuple[str, ...]

    @property
    def scored_Q(self) -> NDArray[np.bool_]:
        """True where the task has a gain."""
        return ~np.isnan(self.gain_Q)


def encode_types(task_types: Sequence[str]) -> tuple[IntArray, tuple[str, ...]]:
    """Codes `(Q,)` and sorted names of task types.

    >>> codes, names = encode_types(["heat", "clean", "heat"])
    >>> codes.tolist(), names
    ([1, 0, 1], ('clean', 'heat'))
    """
    names, codes = np.unique(np.asarray(task_types, dtype=object).astype(str), return_inverse=True)
    return codes.astype(np.int64).reshape(-1), tuple(str(name) for name in names)


def update_statistics(previous: Statistics, gains: TaskGains, decay: float = 0.9) -> Statistics:
    """The statistics after one more step; `decay` is rho in [0, 1). Cost: one sort of the tasks for each statistic.

    A type without a scored task in this step keeps its statistics and its age.
    """
    if not 0.0 <= decay < 1.0:
        raise ConfigError("decay of the moving averages out of range", expected="0 <= decay < 1", found=decay)
    scored = gains.scored_Q
    type_Q = gains.type_Q[scored]
    one_group = np.zeros_like(type_Q)
    old_by_type = [previous.of(name) for name in gains.type_names]
    all_types = _first_moments([previous.all_types], gains, scored, one_group, decay)
    by_type = _first_moments(old_by_type, gains, scored, type_Q, decay)
    # Deviations and noise use the averages just updated; a type lacking a variance looks at the all-type one.
    all_types = _second_moments(all_types, all_types[0], gains, scored, one_group, decay)
    by_type = _second_moments(by_type, all_types[0], gains, scored, type_Q, decay)
    seen = {name: new for name, new in zip(gains.type_names, by_type, strict=True) if new.steps > 0}
    return Statistics(by_type={**previous.by_type, **seen}, all_types=all_types[0])


def _ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    return np.divide(numerator, denominator, out=np.full(len(numerator), np.nan), where=denominator > 0)


def _group_means(values: FloatArray, groups: IntArray, group_count: int) -> FloatArray:
    counts = np.bincount(groups, minlength=group_count).astype(np.float64)
    return _ratio(grouped_sums(values, groups, group_count), counts)


def _pooled_variance(side: TaskMoments, scored: NDArray[np.bool_], groups: IntArray, group_count: int) -> FloatArray:
    freedom = np.maximum(side.count_Q[scored] - 1, 0).astype(np.float64)
    squares = grouped_sums(side.squared_deviations_Q[scored], groups, group_count)
    return _ratio(squares, np.bincount(groups, weights=freedom, minlength=group_count))


def _first_moments(
    old: list[TypeStatistics], gains: TaskGains, scored: NDArray[np.bool_], groups: IntArray, decay: float
) -> list[TypeStatistics]:
    """m_c and the two pooled variances, one entry a group; a group without a task comes back unchanged."""
    means = _group_means(gains.gain_Q[scored], groups, len(old))
    replay = _pooled_variance(gains.replays, scored, groups, len(old))
    control = _pooled_variance(gains.controls, scored, groups, len(old))
    return [
        replace(
            entry,
            steps=entry.steps + (not math.isnan(means[code])),
            gain=entry.gain.updated(float(means[code]), decay),
            replay_variance=entry.replay_variance.updated(float(replay[code]), decay),
            control_variance=entry.control_variance.updated(float(control[code]), decay),
        )
        for code, entry in enumerate(old)
    ]


def _second_moments(
    entries: list[TypeStatistics],
    all_types: TypeStatistics,
    gains: TaskGains,
    scored: NDArray[np.bool_],
    groups: IntArray,
    decay: float,
) -> list[TypeStatistics]:
    """d_c and the mean noise, around the m_c and variances already in `entries`."""
    mean = np.array([entry.gain.value(decay) for entry in entries])
    squared = _group_means((gains.gain_Q[scored] - mean[groups]) ** 2, groups, len(entries))
    variances = np.array([known_variances(entry, all_types, decay) for entry in entries])
    noise_Q = gain_noise(
        variances[groups, 0], variances[groups, 1], gains.replays.count_Q[scored], gains.controls.count_Q[scored]
    )
    noise = _group_means(noise_Q, groups, len(entries))
    return [
        replace(
            entry,
            # d_c must average over the same steps as the noise it is compared with.
            squared_deviation=entry.squared_deviation.updated(
                math.nan if math.isnan(noise[code]) else float(squared[code]), decay
            ),
            noise=entry.noise.updated(float(noise[code]), decay),
        )
        for code, entry in enumerate(entries)
    ]


def known_variances(entry: TypeStatistics, all_types: TypeStatistics, decay: float) -> tuple[float, float]:
    """(v_rep, v_ctl) of a type with the fall-backs of this module's docstring; NaN if no side has ever had a variance."""
    replay = _first_known(entry.replay_variance.value(decay), all_types.replay_variance.value(decay))
    control = _first_known(entry.control_variance.value(decay), all_types.control_variance.value(decay))
    return _first_known(replay, control), _first_known(control, replay)


def _first_known(*values: float) -> float:
    return next((value for value in values if not math.isnan(value)), math.nan)


@dataclass(frozen=True, slots=True)
class ShrunkGains:
    """The shrunk gain of each task and everything it was made of, all `(Q,)`; NaN where unknown or not scored."""

    type_mean_Q: FloatArray  # m_c
    replay_variance_Q: FloatArray  # v_rep
    control_variance_Q: FloatArray  # v_ctl
    noise_Q: FloatArray  # s_q^2
    between_variance_Q: FloatArray  # tau_c^2
    factor_Q: FloatArray  # B_q
    shrunk_gain_Q: FloatArray  # g~_q
    borrowed_Q: NDArray[np.bool_]  # the all-type statistics stood in for the type's own


def shrink(statistics: Statistics, gains: TaskGains, decay: float = 0.9) -> ShrunkGains:
    """Empirical-Bayes shrinkage of each gain towards its type's mean, g~_q = m_c + B_q (g_q - m_c) (method section 2).

    `statistics` are those after `update_statistics` with these very gains. A task without a gain has NaN for noise, B and
    shrunk gain. g~_q lies between m_c and g_q.
    """
    used, borrowed = [], []
    for name in gains.type_names:
        own = statistics.of(name)
        borrowed.append(own.steps <= 1)  # 1: first appearance, in this step; 0: nothing scored yet
        entry = statistics.all_types if own.steps <= 1 else own
        variances = known_variances(entry, statistics.all_types, decay)
        used.append((entry.gain.value(decay), *variances, entry.between_variance(decay)))
    mean, replay, control, between = np.array(used, np.float64).reshape(-1, 4).T[:, gains.type_Q]
    noise = gain_noise(replay, control, gains.replays.count_Q, gains.controls.count_Q)
    noise = np.where(gains.scored_Q, noise, np.nan)
    factor = np.where(gains.scored_Q, shrinkage_factor(between, noise), np.nan)
    shrunk = shrunk_gain(gains.gain_Q, mean, factor)
    return ShrunkGains(mean, replay, control, noise, between, factor, shrunk, np.array(borrowed, bool)[gains.type_Q])
