"""From the record of one step to training rows: who is in the update, with what advantage, trust and teacher.

Mostly pure: tables and a renderer in, rows and counts out. `append_only` makes one row of an episode, `window` one row of
each of its turns. The teacher's sequence holds the very same sampled tokens after prompts with the task's skill. Nothing
is left out silently: every exclusion has a counter, which the stage publishes among its metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from schemas.config import ObjectiveSection
from schemas.errors import ArtifactError, NumericsError
from stages.advantages import episode_rewards, group_advantages
from stages.packing import TrainRow

if TYPE_CHECKING:
    from stages.episodes import EpisodeRecord
    from stages.rendering import Renderer


@dataclass(frozen=True)
class RowFacts:
    """What the table `train_rows` says of a row besides its numbers."""

    kind: str
    task_id: str
    episode_id: str | None = None
    turn: int | None = None
    skill_id: str | None = None
    reward: float | None = None


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """The rows of one update; `facts[i]` belongs to `rows[i]`. `counts` are metrics by name."""

    rows: list[TrainRow]
    facts: list[RowFacts]
    counts: dict[str, float]


@dataclass(frozen=True)
class _Credit:
    """What a counted episode brings into the update."""

    record: EpisodeRecord
    reward: float
    advantage: float


@dataclass(frozen=True)
class _Skill:
    """A task's skill as a teacher: its text and omega_q."""

    skill_id: str
    text: str
    trust: float


@dataclass
class _Rows:
    context_tokens: int | None = None  # longest sequence that the model can hold
    rows: list[TrainRow] = field(default_factory=list)
    facts: list[RowFacts] = field(default_factory=list)
    too_long: int = 0  # rows whose teacher sequence the model cannot hold
    rebuilt: set[str] = field(default_factory=set)  # tasks of which an episode's prompts were rebuilt and compared

    def add(self, row: TrainRow, facts: RowFacts) -> None:
        self.rows.append(row)
        self.facts.append(facts)


def build_training_rows(
    records: Sequence[EpisodeRecord],
    skills: Sequence[Mapping[str, Any]],
    gains: Sequence[Mapping[str, Any]],
    renderer: Renderer,
    objective: ObjectiveSection,
    *,
    with_teacher: bool,
    with_skills: bool,
    distrusted_teach: bool = False,
    context_tokens: int | None = None,
) -> TrainingRows:
    """The rows of a step: rollout rows in the order of `records`, then skill rows in the order of `skills`.

    `skills` and `gains` are rows of those tables, empty where the objective needs none. `distrusted_teach`: the teacher's
    log-probabilities enter by another way than the trusted distillation, so tasks of trust 0 have one too. A row whose
    sequence exceeds `context_tokens` once the skill is in it has no teacher: beyond its context a model's scores mean nothing.
    Raises NumericsError when no episode is left to train on, ArtifactError when recorded prompts cannot be rebuilt.
    """
    credits, counts = _credit(records, objective)
    gain_of = {row["task_id"]: row for row in gains}
    task_ids = sorted({credit.record.job.task.task_id for credit in credits})
    teachers, teacher_counts = ({}, {})
    if with_teacher:
        spared = objective.opsd_weight == "trust" and not distrusted_teach
        teachers, teacher_counts = _teachers(task_ids, skills, gain_of, spared)
    made = _Rows(context_tokens)
    for credit in credits:
        _add_episode(made, credit, teachers.get(credit.record.job.task.task_id), gain_of, renderer)
    if not made.rows:
        raise NumericsError(
            "no episode is left to train on",
            expected=">= 1 rollout with a sampled token in a group of at least 2",
            found=f"{len(records)} rollouts, {int(counts['episodes/excluded'])} excluded",
        )
    counts |= teacher_counts | {"rows/rollout": float(len(made.rows))}
    if with_teacher:
        counts["opsd/rows_too_long"] = float(made.too_long)
    if gains:
        trust = [_trust(gain_of, task_id) for task_id in task_ids]
        counts |= {
            "trust_mean": float(np.mean(trust)),
            "trust_zero_share": float(np.mean([value == 0.0 for value in trust])),
        }
    if with_skills:
        counts |= _add_skills(made, skills, gain_of)
    counts["tokens"] = float(sum(row.sampled_tokens for row in made.rows))
    counts["tokens/padded_row_max"] = float(max(len(row.token_ids) for row in made.rows))
    return TrainingRows(made.rows, made.facts, counts)


def _credit(records: Sequence[EpisodeRecord], objective: ObjectiveSection) -> tuple[list[_Credit], dict[str, float]]:
    """Advantages of the episodes that count. One without an outcome does not, nor one whose group has no other."""
    valid = [record for record in records if record.won is not None]
    sizes = Counter(record.job.task.task_id for record in valid)
    kept = [record for record in valid if sizes[record.job.task.task_id] >= 2]
    groups = {task_id: index for index, task_id in enumerate(sorted({record.job.task.task_id for record in kept}))}
    counts = {
        "episodes": float(len(records)),
        "episodes/no_outcome": float(len(records) - len(valid)),
        "episodes/alone_in_group": float(len(valid) - len(kept)),
        "episodes/excluded": float(len(records) - len(kept)),
        "groups": float(len(groups)),
    }
    if not kept:
        return [], counts | {"groups/zero_variance": 0.0}
    reward = episode_rewards(
        [float(bool(record.won)) for record in kept],
        [record.invalid_turns for record in kept],
        objective.success_reward,
        objective.invalid_penalty,
    )
    found = group_advantages(
        reward,
        [groups[record.job.task.task_id] for record in kept],
        norm=objective.advantage_norm,
        eps=objective.advantage_eps,
        group_stats=objective.group_stats,
        turns=[max(1, len(record.turns)) for record in kept],
    )
    flat = float(found.zero_variance_Q.sum())
    counts |= {
        "groups/zero_variance": flat,
        "groups/zero_variance_share": flat / len(groups),
        "reward_mean": float(np.mean(reward)),
        "advantage_absolute_mean": float(np.mean(np.abs(found.advantage_R))),
    }
    return [_Credit(*entry) for entry in zip(kept, reward.tolist(), found.advantage_R.tolist(), strict=True)], counts


def _teachers(
    task_ids: Iterable[str],
    skills: Sequence[Mapping[str, Any]],
    gain_of: Mapping[str, Mapping[str, Any]],
    spared: bool,
) -> tuple[dict[str, _Skill], dict[str, float]]:
    """The tasks that have a teacher; `spared`: a task of trust 0 has none, as its pass would be multiplied by 0."""
    skill_of = {row["task_id"]: row for row in skills if row["skill"] is not None}
    teachers: dict[str, _Skill] = {}
    without, distrusted = 0, 0
    for task_id in task_ids:
        row = skill_of.get(task_id)
        trust = _trust(gain_of, task_id)
        if row is None:
            without += 1
        elif trust == 0.0 and spared:
            distrusted += 1
        else:
            teachers[task_id] = _Skill(row["skill_id"], row["skill"], trust)
    return teachers, {
        "opsd/tasks": float(len(teachers)),
        "opsd/tasks_no_skill": float(without),
        "opsd/tasks_trust_0": float(distrusted),
    }


def _trust(gain_of: Mapping[str, Mapping[str, Any]], task_id: str) -> float:
    return float(gain_of[task_id]["trust"]) if task_id in gain_of else 1.0


def _add_episode(
    made: _Rows,
    credit: _Credit,
    teacher: _Skill | None,
    gain_of: Mapping[str, Mapping[str, Any]],
    renderer: Renderer,
) -> None:
    """One row of the whole episode, or one of each turn. Turns without a sampled token carry no loss and make no row."""
    record = credit.record
    prompts = [list(turn.prompt_token_ids) for turn in record.turns]
    taught = None if teacher is None else _prompts(renderer, record, teacher.text)
    if teacher is not None:
        _check_rebuilt(made, renderer, record, prompts)
    whole = renderer.mode == "append_only"
    spans = [range(len(record.turns))] if whole else [range(turn, turn + 1) for turn in range(len(record.turns))]
    for span in spans:
        turns = [record.turns[turn] for turn in span]
        if not any(turn.token_ids for turn in turns):
            continue
        token_ids, sampled = _joined([prompts[turn] for turn in span], [turn.token_ids for turn in turns])
        teacher_ids, teacher_sampled = None, None
        if taught is not None:
            teacher_ids, teacher_sampled = _joined([taught[turn] for turn in span], [turn.token_ids for turn in turns])
            if made.context_tokens is not None and len(teacher_ids) > made.context_tokens:
                teacher_ids, teacher_sampled = None, None
                made.too_long += 1
        name = record.job.episode_id if whole else f"{record.job.episode_id}/{turns[0].turn}"
        row = TrainRow(
            kind="rollout",
            row_id=name,
            token_ids=token_ids,
            sampled=sampled,
            behaviour_logprobs=_logprobs([turn.behaviour_logprobs for turn in turns]),
            advantage=credit.advantage,
            trust=_trust(gain_of, record.job.task.task_id),
            temperature=float(turns[0].temperature),
            teacher_token_ids=teacher_ids,
            teacher_sampled=teacher_sampled,
        )
        facts = RowFacts(
            "rollout",
            record.job.task.task_id,
            record.job.episode_id,
            None if whole else turns[0].turn,
            None if teacher is None or teacher_ids is None else teacher.skill_id,
            credit.reward,
        )
        made.add(row, facts)


def _prompts(renderer: Renderer, record: EpisodeRecord, skill: str | None) -> list[list[int]]:
    from stages.rendering import turn_prompt_ids

    return [
        turn_prompt_ids(renderer, record.job.task, record.turns[:place], turn, skill)
        for place, turn in enumerate(record.turns)
    ]


def _check_rebuilt(made: _Rows, renderer: Renderer, record: EpisodeRecord, prompts: list[list[int]]) -> None:
    """A teacher's prompt is only worth something if rebuilding without the skill gives what the student really saw.

    Asked of the first episode with turns of every task: others of the task follow the same wording and settings.
    """
    task_id = record.job.task.task_id
    if not prompts or task_id in made.rebuilt:
        return
    made.rebuilt.add(task_id)
    if _prompts(renderer, record, None) != prompts:
        raise ArtifactError(
            "a recorded prompt cannot be rebuilt",
            where=f"episode {record.job.episode_id}",
            expected="the recorded prompt ids",
            found="others: wording, tokenizer or prompt settings have changed",
            remedy="run the rollout stage again with --force",
        )


def _joined(
    prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Prompt, reply, prompt, reply, ... as one sequence, and the mask of the replies.

    >>> ids, sampled = _joined([[1, 2], [5]], [[3, 4], [6]])
    >>> ids.tolist(), sampled.astype(int).tolist()
    ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])
    """
    ids = [token for prompt, reply in zip(prompts, replies, strict=True) for token in (*prompt, *reply)]
    mask = [
        place >= len(prompt)
        for prompt, reply in zip(prompts, replies, strict=True)
        for place in range(len(prompt) + len(reply))
    ]
    return np.asarray(ids, np.int32), np.asarray(mask, np.bool_)


def _logprobs(turns: Iterable[Sequence[float | None]]) -> NDArray[np.float32]:
    return np.asarray([np.nan if value is None else value for turn in turns for value in turn], np.float32)


def _add_skills(
    made: _Rows, skills: Sequence[Mapping[str, Any]], gain_of: Mapping[str, Mapping[str, Any]]
) -> dict[str, float]:
    """One row for each written skill that was checked (r_q not null)."""
    written, checked = 0, 0
    for skill in skills:
        if not skill["token_ids"]:
            continue
        written += 1
        reward = gain_of.get(skill["task_id"], {}).get("skill_reward")
        if reward is None:
            continue
        checked += 1
        token_ids, sampled = _joined([skill["prompt_token_ids"]], [skill["token_ids"]])
        row = TrainRow(
            kind="skill",
            row_id=skill["skill_id"],
            token_ids=token_ids,
            sampled=sampled,
            behaviour_logprobs=_logprobs([skill["behaviour_logprobs"]]),
            skill_reward=float(reward),
            temperature=float(skill["temperature"]),
        )
        made.add(row, RowFacts("skill", skill["task_id"], skill_id=skill["skill_id"]))
    return {"rows/skill": float(checked), "skill/written": float(written), "skill/unchecked": float(written - checked)}
