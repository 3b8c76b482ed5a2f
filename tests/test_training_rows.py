"""Training rows: the sampled tokens and nothing else carry loss, the teacher reads the same ones, exclusions are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from data.environments import Observation
from schemas.config import ObjectiveSection
from schemas.errors import ArtifactError, NumericsError
from stages.episodes import EpisodeJob, EpisodeRecord, TurnRecord
from stages.rendering import Renderer, next_prompt_ids
from stages.training_rows import TrainingRows, build_training_rows
from tests.fake_world import FakePrompts, fake_task

SKILL = "look into the fridge before the desk"


def renderer_of(tokenizer: PreTrainedTokenizerFast, mode: str) -> Renderer:
    return Renderer(tokenizer, FakePrompts(), mode, 2, False)


def episode(
    renderer: Renderer, name: str, index: int, turns: int, *, won: bool | None, invalid: int = 0
) -> EpisodeRecord:
    """An episode whose prompts are those the renderer writes; reply t is 20 + t, 21 + t, end of turn."""
    task = fake_task(name)
    played: list[TurnRecord] = []
    for turn in range(turns):
        observation = Observation(f"you see {turn}", ("go",))
        played.append(
            TurnRecord(
                turn=turn,
                observation=observation.text,
                admissible_commands=observation.admissible_commands,
                prompt_token_ids=tuple(next_prompt_ids(renderer, task, played, observation, None)),
                token_ids=(20 + turn, 21 + turn, renderer.eos_ids[0]),
                behaviour_logprobs=(-0.5, -0.25, -0.125 * (index + 1)),
                temperature=0.75,
                text=f"reply {turn}",
                action="go",
                valid=turn >= invalid,
                invalid_reason=None if turn >= invalid else "no_action",
                stop_reason="eos",
                seed=turn,
            )
        )
    job = EpisodeJob(task, index, 0, None, None, f"e-{name}-{index}")
    reason = "env_error" if won is None else "done"
    return EpisodeRecord(job, "f", won, None, {}, invalid, reason, None, tuple(played), Observation("end"))


def skill_row(name: str, skill: str | None = SKILL) -> dict[str, Any]:
    return {
        "task_id": name,
        "skill_id": f"s-{name}",
        "skill": skill,
        "prompt_token_ids": [30, 31],
        "token_ids": [40, 41, 42],
        "behaviour_logprobs": [-1.0, None, -2.0],
        "temperature": 1.0,
    }


def gain_row(name: str, trust: float = 1.5, reward: float | None = 0.25) -> dict[str, Any]:
    return {"task_id": name, "trust": trust, "skill_reward": reward}


def group(renderer: Renderer, name: str, turns: int = 3) -> list[EpisodeRecord]:
    return [episode(renderer, name, index, turns, won=index == 0, invalid=index % 2) for index in range(4)]


def build(
    records: list[EpisodeRecord],
    skills: list,
    gains: list,
    renderer: Renderer,
    distrusted_teach: bool = False,
    context_tokens: int | None = None,
    **objective: Any,
) -> TrainingRows:
    return build_training_rows(
        records,
        skills,
        gains,
        renderer,
        ObjectiveSection(**objective),
        with_teacher=True,
        with_skills=True,
        distrusted_teach=distrusted_teach,
        context_tokens=context_tokens,
    )


def test_append_only_makes_one_row_of_an_episode_window_one_of_each_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    for mode, rows_expected in (("append_only", 4), ("window", 12)):
        renderer = renderer_of(tokenizer, mode)
        records = group(renderer, "a")
        made = build(records, [], [], renderer)
        assert len(made.rows) == made.counts["rows/rollout"] == rows_expected
        replies = [token for record in records for turn in record.turns for token in turn.token_ids]
        assert [int(token) for row in made.rows for token in row.targets] == replies
        logprobs = [value for record in records for turn in record.turns for value in turn.behaviour_logprobs]
        assert [float(value) for row in made.rows for value in row.behaviour_logprobs] == logprobs
        prompts = [token for record in records for turn in record.turns for token in turn.prompt_token_ids]
        assert [int(token) for row in made.rows for token in row.token_ids[~row.sampled]] == prompts
        assert all(row.temperature == 0.75 for row in made.rows)
        assert [facts.turn for facts in made.facts[:2]] == ([None, None] if mode == "append_only" else [0, 1])


@pytest.mark.parametrize("mode", ["append_only", "window"])
def test_the_teacher_reads_the_same_sampled_tokens_after_prompts_with_the_skill(
    tokenizer: PreTrainedTokenizerFast, mode: str
) -> None:
    renderer = renderer_of(tokenizer, mode)
    made = build(group(renderer, "a"), [skill_row("a")], [gain_row("a", reward=None)], renderer)
    extra = len(tokenizer(f"Skill: {SKILL}\n", add_special_tokens=False)["input_ids"])
    for row, facts in zip(made.rows, made.facts, strict=True):
        assert row.teacher_token_ids is not None and row.teacher_sampled is not None
        assert np.array_equal(row.teacher_token_ids[row.teacher_sampled], row.targets)
        assert len(row.teacher_token_ids) == len(row.token_ids) + extra
        assert SKILL in tokenizer.decode(row.teacher_token_ids.tolist())
        assert SKILL not in tokenizer.decode(row.token_ids.tolist())
        assert facts.skill_id == "s-a" and row.trust == 1.5


@pytest.mark.parametrize("mode", ["append_only", "window"])
def test_a_row_that_fits_the_context_only_without_the_skill_has_no_teacher_and_is_counted(
    tokenizer: PreTrainedTokenizerFast, mode: str
) -> None:
    renderer = renderer_of(tokenizer, mode)
    records = [*group(renderer, "a", turns=1), *group(renderer, "b", turns=3)]
    skills, gains = [skill_row("a"), skill_row("b")], [gain_row("a"), gain_row("b")]
    unlimited = build(records, skills, gains, renderer)
    lengths = [len(row.teacher_token_ids) for row in unlimited.rows if row.teacher_token_ids is not None]
    limit = max(lengths) - 1
    made = build(records, skills, gains, renderer, context_tokens=limit)
    kept = [row.teacher_token_ids for row in made.rows if row.teacher_token_ids is not None]
    assert len(made.rows) == len(unlimited.rows) and [len(ids) for ids in kept] == [n for n in lengths if n <= limit]
    assert made.counts["opsd/rows_too_long"] == len(lengths) - len(kept) > 0
    assert unlimited.counts["opsd/rows_too_long"] == 0
    for row, facts in zip(made.rows, made.facts, strict=True):
        assert row.kind == "skill" or (facts.skill_id is None) == (row.teacher_token_ids is None)


def test_tasks_without_a_skill_or_trust_have_no_teacher_and_are_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = renderer_of(tokenizer, "append_only")
    records = [record for name in "abc" for record in group(renderer, name)]
    skills = [skill_row("a"), skill_row("b", None), skill_row("c")]
    gains = [gain_row("a"), gain_row("b", 1.0, None), gain_row("c", 0.0)]
    made = build(records, skills, gains, renderer)
    taught = {
        facts.task_id for row, facts in zip(made.rows, made.facts, strict=True) if row.teacher_token_ids is not None
    }
    assert taught == {"a"}
    assert [made.counts[f"opsd/{name}"] for name in ("tasks", "tasks_no_skill", "tasks_trust_0")] == [1, 1, 1]
    trusting = build(records, skills, gains, renderer, opsd_weight="one")
    assert trusting.counts["opsd/tasks"] == 2
    assert build(records, skills, gains, renderer, distrusted_teach=True).counts["opsd/tasks"] == 2
    assert made.counts["trust_mean"] == pytest.approx(2.5 / 3) and made.counts["trust_zero_share"] == pytest.approx(
        1 / 3
    )


def test_checked_skills_become_rows_and_unchecked_ones_a_count(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = renderer_of(tokenizer, "append_only")
    records = [record for name in "ab" for record in group(renderer, name)]
    made = build(records, [skill_row("a"), skill_row("b")], [gain_row("a"), gain_row("b", 1.0, None)], renderer)
    skills = [row for row in made.rows if row.kind == "skill"]
    assert [row.row_id for row in skills] == ["s-a"] and skills[0].skill_reward == 0.25
    assert skills[0].token_ids.tolist() == [30, 31, 40, 41, 42] and skills[0].targets.tolist() == [40, 41, 42]
    assert np.isnan(skills[0].behaviour_logprobs[1]) and skills[0].teacher_token_ids is None
    assert [made.counts[name] for name in ("rows/skill", "skill/written", "skill/unchecked")] == [1, 2, 1]


def test_advantages_are_those_of_the_rewards_and_every_turn_has_its_episodes(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    renderer = renderer_of(tokenizer, "window")
    made = build(group(renderer, "a"), [], [], renderer)
    rewards = np.array([10.0, -0.1, 0.0, -0.1])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert np.allclose([row.advantage for row in made.rows], np.repeat(expected, 3))
    assert np.allclose([facts.reward for facts in made.facts], np.repeat(rewards, 3))
    softer = build(group(renderer, "a"), [], [], renderer, advantage_eps=1.0)
    assert np.allclose(
        [row.advantage for row in softer.rows], np.repeat(rewards - rewards.mean(), 3) / (rewards.std(ddof=1) + 1)
    )


def test_episodes_without_an_outcome_do_not_count_and_lonely_ones_neither(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = renderer_of(tokenizer, "append_only")
    broken = [replace(record, won=None) if record.job.index == 2 else record for record in group(renderer, "a")]
    lonely = [episode(renderer, "b", 0, 2, won=True), episode(renderer, "b", 1, 2, won=None)]
    made = build([*broken, *lonely], [], [], renderer)
    assert [facts.episode_id for facts in made.facts] == ["e-a-0", "e-a-1", "e-a-3"]
    assert made.counts["episodes/no_outcome"] == 2 and made.counts["episodes/alone_in_group"] == 1
    assert made.counts["episodes/excluded"] == 3 and made.counts["groups"] == 1
    with pytest.raises(NumericsError, match="no episode is left"):
        build(lonely, [], [], renderer)


def test_groups_without_spread_are_counted_and_have_advantage_zero(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = renderer_of(tokenizer, "append_only")
    flat = [episode(renderer, "b", index, 2, won=False) for index in range(3)]
    made = build([*group(renderer, "a"), *flat], [], [], renderer)
    assert made.counts["groups/zero_variance"] == 1 and made.counts["groups/zero_variance_share"] == 0.5
    assert {row.advantage for row, facts in zip(made.rows, made.facts, strict=True) if facts.task_id == "b"} == {0.0}


def test_prompts_that_cannot_be_rebuilt_are_refused_before_a_teacher_scores_them(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    renderer = renderer_of(tokenizer, "append_only")
    records = group(renderer, "a")
    first = records[0].turns[0]
    altered = replace(records[0], turns=(replace(first, observation="another room"), *records[0].turns[1:]))
    with pytest.raises(ArtifactError, match="cannot be rebuilt"):
        build([altered, *records[1:]], [skill_row("a")], [gain_row("a")], renderer)


def test_the_first_counted_episode_of_every_task_is_rebuilt_whatever_its_index(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    renderer = renderer_of(tokenizer, "append_only")
    lost = [replace(record, won=None) if record.job.index == 0 else record for record in group(renderer, "b")]
    first = lost[1].turns[0]
    lost[1] = replace(lost[1], turns=(replace(first, observation="another room"), *lost[1].turns[1:]))
    skills, gains = [skill_row("a"), skill_row("b")], [gain_row("a"), gain_row("b")]
    with pytest.raises(ArtifactError, match=r"cannot be rebuilt \(episode e-b-1\)"):
        build([*group(renderer, "a"), *lost], skills, gains, renderer)
