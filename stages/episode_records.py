"""What an episode leaves behind: its job, its turns, its outcome; to table rows and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from data.environments import Observation
from data.tasks import Task
from schemas.errors import ArtifactError


@dataclass(frozen=True)
class EpisodeJob:
    """One episode to play. `seed` decides every draw; `skill` (with its id) goes into the prompt of a teacher episode."""

    task: Task
    index: int
    seed: int
    skill: str | None
    skill_id: str | None
    episode_id: str


@dataclass(frozen=True)
class TurnRecord:
    """One turn: what was seen, the ids added as prompt, the sampled ids with their log-probabilities, how it was read.

    Fields are the turn columns of `schemas.tables`. `token_ids` are the only ids that ever carry loss.
    """

    turn: int
    observation: str
    admissible_commands: tuple[str, ...]
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    temperature: float
    text: str
    action: str | None
    valid: bool
    invalid_reason: str | None
    stop_reason: str
    seed: int


@dataclass(frozen=True)
class EpisodeRecord:
    """One episode. `won` is None when it does not count (environment error or time-out), else the environment's verdict.

    `stop_reason`: `done` (the environment ended it), `max_turns`, `context` (no room for another prompt or reply),
    `env_error`, `timeout`. `final_observation` is what the environment said last, without its commands.
    """

    job: EpisodeJob
    fingerprint: str | None
    won: bool | None
    score: float | None
    metrics: Mapping[str, float]
    invalid_turns: int
    stop_reason: str
    error: str | None
    turns: tuple[TurnRecord, ...]
    final_observation: Observation | None

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    def episode_row(self, step: int, weights_sha256: str) -> dict[str, Any]:
        """The row of `rollouts`, `replays` or (two columns short) `evals`."""
        job = self.job
        return {
            "step": step,
            "episode_id": job.episode_id,
            "task_id": job.task.task_id,
            "task_type": job.task.task_type,
            "task_sha256": job.task.sha256,
            "index": job.index,
            "skill_id": job.skill_id,
            "seed": job.seed,
            "fingerprint": self.fingerprint,
            "won": self.won,
            "score": self.score,
            "metrics": sorted(self.metrics.items()) or None,
            "labels": sorted(job.task.labels.items()) or None,
            "turns": len(self.turns),
            "invalid_turns": self.invalid_turns,
            "sampled_tokens": self.sampled_tokens,
            "stop_reason": self.stop_reason,
            "error": self.error,
            "final_observation": None if self.final_observation is None else self.final_observation.text,
            "weights_sha256": weights_sha256,
        }

    def turn_rows(self, step: int) -> list[dict[str, Any]]:
        """The rows of the turns, in order."""
        ids = {"step": step, "episode_id": self.job.episode_id, "task_id": self.job.task.task_id}
        return [{**ids, **_lists(vars(turn))} for turn in self.turns]


def episodes_from_tables(
    rollouts: pa.Table, turns: pa.Table, tasks: Mapping[str, Task], skills: Mapping[str, str] | None = None
) -> list[EpisodeRecord]:
    """The records behind an episode table and its turn table, in the order of the episode table.

    `skills` gives the texts of skill ids (without it `job.skill` stays None). Raises ArtifactError when a task is unknown
    or differs, or when the turns of an episode are not complete.
    """
    by_episode: dict[str, list[dict[str, Any]]] = {}
    for row in turns.to_pylist():
        by_episode.setdefault(row["episode_id"], []).append(row)
    return [_episode(row, by_episode.get(row["episode_id"], []), tasks, skills or {}) for row in rollouts.to_pylist()]


def _episode(
    row: dict[str, Any], turn_rows: list[dict[str, Any]], tasks: Mapping[str, Task], skills: Mapping[str, str]
) -> EpisodeRecord:
    task = tasks.get(row["task_id"])
    if task is None or task.sha256 != row["task_sha256"]:
        raise ArtifactError(
            "an episode's task is not the one on record",
            where=f"episode {row['episode_id']}",
            expected=f"task {row['task_id']} with hash {row['task_sha256'][:12]}",
            found="no such task in the panel" if task is None else f"hash {task.sha256[:12]}",
        )
    turn_rows = sorted(turn_rows, key=lambda turn: turn["turn"])
    if [turn["turn"] for turn in turn_rows] != list(range(row["turns"])):
        raise ArtifactError(
            "the turns of an episode are incomplete",
            where=f"episode {row['episode_id']}",
            expected=f"{row['turns']} turns",
            found=f"turns {[turn['turn'] for turn in turn_rows]}",
        )
    job = EpisodeJob(task, row["index"], row["seed"], skills.get(row["skill_id"]), row["skill_id"], row["episode_id"])
    final = row["final_observation"]
    return EpisodeRecord(
        job=job,
        fingerprint=row["fingerprint"],
        won=row["won"],
        score=row["score"],
        metrics=dict(row["metrics"] or ()),
        invalid_turns=row["invalid_turns"],
        stop_reason=row["stop_reason"],
        error=row["error"],
        turns=tuple(TurnRecord(**_tuples(turn)) for turn in turn_rows),
        final_observation=None if final is None else Observation(final),
    )


def _lists(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def _tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    names = TurnRecord.__dataclass_fields__
    return {name: tuple(row[name]) if isinstance(row[name], list) else row[name] for name in names}
