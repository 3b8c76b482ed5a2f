"""What a configuration amounts to: episodes, parts, tokens and bytes of a step, known before anything runs."""

from __future__ import annotations

import math
import re
import shutil
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import ConfigError

if TYPE_CHECKING:
    from schemas.config import Config

MINIMUM_FREE_BYTES = 32 * 1024 * 1024

# Bytes in Parquet for one token of a turn: an id of the prompt or reply, and the reply's log-probability, compressed.
_PROMPT_TOKEN_BYTES, _REPLY_TOKEN_BYTES = 2, 6
_TURN_TEXT_BYTES = 600


def make_plan(config: Config, root: Path | None = None) -> dict[str, Any]:
    """Derived figures, in the order they are shown. Upper bounds are named `most_*`.

    Raises ConfigError for arithmetic that cannot work, such as a generated panel smaller than a step.
    """
    tasks = config.tasks.per_step
    _check_panel("train", config.tasks.train, tasks)
    _check_panel("evaluate", config.tasks.evaluate, 1)
    student, teacher = tasks * config.rollout.group_size, tasks * config.replay.replays
    turns = (student + teacher) * config.env.max_turns
    checkpoint = checkpoint_bytes(config)
    tables = turns * turn_bytes(config)
    kept = config.run.keep_last + (config.run.steps // config.run.keep_every if config.run.keep_every else 0) + 1
    plan: dict[str, Any] = {
        "steps": config.run.steps,
        "tasks_per_step": tasks,
        "student_episodes_per_step": student,
        "most_skills_per_step": tasks,
        "most_replays_per_step": teacher,
        "parts_per_step": math.ceil(tasks / config.rollout.groups_per_part),
        "most_turns_per_step": turns,
        "most_sampled_tokens_per_step": turns * config.prompt.max_reply_tokens + tasks * config.replay.max_skill_tokens,
        "evaluations": _evaluations(config.run.steps, config.evaluate.every),
        "most_table_bytes_per_step": tables,
        "checkpoint_bytes": checkpoint,
        "most_bytes_of_the_run": None if checkpoint is None else tables * config.run.steps + checkpoint * kept,
    }
    return plan | _place(root)


def make_evaluation_plan(config: Config, played: str, batch_episodes: int, root: Path | None) -> dict[str, Any]:
    """What one evaluation amounts to, in the order shown; `played` names the weights. None: known when the panel is read."""
    tasks = _check_panel("evaluate", config.tasks.evaluate, 1)
    episodes = None if tasks is None else tasks * config.evaluate.attempts
    return {
        "evaluated": played,
        "panel": config.tasks.evaluate,
        "tasks": tasks,
        "attempts": config.evaluate.attempts,
        "seed": config.evaluate.seed,
        "temperature": config.evaluate.temperature,
        "episodes": episodes,
        "batch_episodes": batch_episodes,
        "most_turns": None if episodes is None else episodes * config.env.max_turns,
    } | _place(root)


def _place(root: Path | None) -> dict[str, Any]:
    if root is None:
        return {}
    path = Path(root).expanduser().resolve()
    return {"run_directory": str(path), "free_bytes": shutil.disk_usage(_existing(path)).free}


def _evaluations(steps: int, every: int) -> int:
    """Before the first step, every n-th, and after the last.

    >>> _evaluations(25, 10), _evaluations(20, 10), _evaluations(5, 0)
    (4, 3, 0)
    """
    return 1 + -(-steps // every) if every else 0


def turn_bytes(config: Config) -> int:
    """Most bytes of one turn's row on disk."""
    # append_only stores only what was added since the last reply; an observation is far shorter than a whole prompt.
    prompt = config.prompt.max_prompt_tokens if config.prompt.mode == "window" else 256
    return prompt * _PROMPT_TOKEN_BYTES + config.prompt.max_reply_tokens * _REPLY_TOKEN_BYTES + _TURN_TEXT_BYTES


def checkpoint_bytes(config: Config) -> int | None:
    """Bytes of one checkpoint with optimiser state; None for a model that is not on this disk yet."""
    path = config.model.path
    if path.startswith("bundled:"):
        folder = Path(str(resources.files("data"))) / "policies" / path.removeprefix("bundled:")
    else:
        folder = Path(path).expanduser()
    weights = sum(file.stat().st_size for file in sorted(folder.glob("*.safetensors"))) if folder.is_dir() else 0
    if not weights:
        return None
    # AdamW keeps two fp32 moments, and fp32 parameters besides lower-precision weights.
    return weights * (3 if config.model.dtype == "float32" else 7)


def _check_panel(key: str, source: str, least: int) -> int | None:
    """The number of tasks a source says it has; None where only reading it tells. ConfigError for fewer than `least`."""
    count = re.search(r"(?:^|[:,])count=(\d+)", source) if source.startswith("generated:") else None
    if count and int(count[1]) < least:
        raise ConfigError(
            "the panel is smaller than one step",
            where=f"tasks.{key}",
            expected=f"at least {least} tasks",
            found=count[1],
            remedy="raise count or lower tasks.per_step",
        )
    return int(count[1]) if count else None


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
