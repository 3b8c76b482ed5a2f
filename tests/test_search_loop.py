"""Search agents through the stages: exact restarts, recorded scores, a server that fails, a cache that is hit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from data.environments import EnvironmentSpec
from data.retrieval import RetrievalFault
from data.search.environment import SearchEnvironment
from data.search.retrievers import CountedRetriever
from schemas.config import Config
from schemas.config_loading import config_from_mapping
from schemas.errors import EnvironmentFault
from schemas.run_directory import RunDirectory
from schemas.table_io import read_table
from stages import estimate_gains, loop, replay, rollout
from stages.workbench import Workbench
from tests.test_stages import Notes

WORLD = "generated:articles=200,seed=5"


def small_search(model: Path, **options: object) -> Config:
    retriever = {"index": WORLD}
    return config_from_mapping(
        {
            "run": {"steps": 1, "threads": 1},
            "model": {"path": str(model)},
            "env": {
                "name": "search",
                "max_turns": 3,
                "options": {"prompts": "compact", "topk": 2, "passage_words": 12, "retriever": retriever, **options},
            },
            "tasks": {
                "train": f"{WORLD},split=train,count=8",
                "evaluate": f"{WORLD},split=test,count=6",
                "per_step": 4,
            },
            "prompt": {"mode": "append_only", "max_reply_tokens": 128, "max_episode_tokens": 1900},
            "engine": {"name": "tests.search_world:SearchingEngine"},
            "rollout": {"group_size": 4, "groups_per_part": 2},
            "replay": {"replays": 2, "max_skill_tokens": 128},
            "objective": {"success_reward": 1.0, "invalid_penalty": 0.01},
            "evaluate": {"every": 1, "temperature": 1.0},
            "optimizer": {"lr": 1e-3},
        }
    )


@pytest.mark.parametrize("mode", ["append_only", "window"])
def test_one_iteration_of_search_agents(mode: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    config = small_search(tiny_model_dir, cache={"path": str(tmp_path / "q.sqlite")})
    config = config.model_copy(update={"prompt": config.prompt.model_copy(update={"mode": mode, "history": 3})})
    run = RunDirectory.create(tmp_path / "run", config)
    notes = Notes()
    result = loop.run(run, reporter=notes)
    assert result.state == "done"
    rollouts = read_table(run, "rollouts", 1).to_pylist()
    assert len(rollouts) == 16 and all(row["error"] is None and row["won"] is not None for row in rollouts)
    starts = {row["task_id"]: row["fingerprint"] for row in rollouts}
    assert len(starts) == 4 and all(row["fingerprint"] == starts[row["task_id"]] for row in rollouts)
    replays = read_table(run, "replays", 1).to_pylist()
    assert len(replays) == 8 and all(row["fingerprint"] == starts[row["task_id"]] for row in replays)
    assert all(row["error"] is None for row in replays)
    gains = read_table(run, "gains", 1).to_pylist()
    assert len(gains) == 4 and all(row["replay_gain"] is not None for row in gains)
    assert {dict(row["labels"])["hops"] for row in rollouts} <= {"1", "2"}
    assert all(set(dict(row["metrics"])) == {"f1", "searches", "substring_match"} for row in rollouts)
    assert all(row["score"] == dict(row["metrics"])["f1"] for row in rollouts)
    assert any(dict(row["metrics"])["searches"] > 0 for row in rollouts) and any(
        row["invalid_turns"] for row in rollouts
    )
    turns = read_table(run, "rollout_turns", 1).to_pylist()
    shown = [turn for turn in turns if turn["observation"].startswith("<information>")]
    assert shown and all("<information>" not in turn["text"] for turn in turns)
    assert any("cache" in line and "hit" in line for line in notes.lines)
    evaluation = read_table(run, "evals", 1)
    assert len(evaluation) == 6
    assert loop.run(run).state == "up_to_date"


def test_retrieved_text_carries_no_loss(tiny_model_dir: Path, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", small_search(tiny_model_dir))
    loop.run(run)
    sampled = {}
    for turn in read_table(run, "rollout_turns", 1).to_pylist():
        sampled[turn["episode_id"]] = sampled.get(turn["episode_id"], 0) + len(turn["token_ids"])
    rows = [row for row in read_table(run, "train_rows", 1).to_pylist() if row["kind"] == "rollout"]
    assert rows and all(row["loss_tokens"] == sampled[row["episode_id"]] for row in rows)


class FlakyRetriever:
    """Answers as the one inside, except for queries that hold a given text."""

    def __init__(self, inner: CountedRetriever, fails: str) -> None:
        self.inner, self.fails = inner, fails
        self.settings = inner.settings
        self.index_id = inner.index_id

    def search(self, queries, topk):
        answers = self.inner.search(queries, topk)
        return [
            RetrievalFault("the server does not answer") if self.fails in query else answer
            for query, answer in zip(queries, answers, strict=True)
        ]

    def close(self) -> None:
        self.inner.close()


@contextmanager
def flaky_bench(run: RunDirectory, fails: str) -> Iterator[Workbench]:
    environment = EnvironmentSpec(run.config.env.name, run.config.env.options).build()
    assert isinstance(environment, SearchEnvironment)
    sound = environment.retriever
    environment.__dict__["retriever"] = CountedRetriever(FlakyRetriever(sound, fails), sound.corpus_sha256)
    with Workbench(run) as bench:
        bench.__dict__["environment"] = environment
        yield bench


def test_a_search_that_fails_is_a_row_that_counts_for_nothing(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = small_search(tiny_model_dir)
    patient = config.model_copy(update={"env": config.env.model_copy(update={"max_error_share": 1.0})})
    run = RunDirectory.create(tmp_path / "run", patient)
    with flaky_bench(run, "") as bench:
        rollout.run(run, 1, bench=bench)
        replay.run(run, 1, bench=bench)
        estimate_gains.run(run, 1)
    rollouts = read_table(run, "rollouts", 1).to_pylist()
    broken = [row for row in rollouts if row["stop_reason"] == "env_error"]
    assert broken and all(row["won"] is None and row["error"] == "the server does not answer" for row in broken)
    for gain in read_table(run, "gains", 1).to_pylist():
        counted = [row for row in rollouts if row["task_id"] == gain["task_id"] and row["won"] is not None]
        assert gain["controls"] <= len(counted)


def test_a_stage_fails_when_too_many_searches_do(tiny_model_dir: Path, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", small_search(tiny_model_dir))
    with flaky_bench(run, "") as bench, pytest.raises(EnvironmentFault, match="too many episodes.*the server does not"):
        rollout.run(run, 1, bench=bench)
    with Workbench(run) as bench:
        assert rollout.run(run, 1, bench=bench).state == "done"
