"""The tables of a run: explicit Arrow schemas with versions.

`large_string` and `large_list` throughout (32-bit offsets overflow at 2 GB), null and never NaN for "not scored". Episodes
carry outcomes, their turns carry tokens; every row joins to others by `step`, `task_id`, `episode_id` and `skill_id`.
Columns of wall-clock time live in `timings` alone, so that every other table is a function of the inputs.
"""

from __future__ import annotations

import pyarrow as pa

TEXT = pa.large_string()
TOKENS = pa.large_list(pa.int32())
FLOATS = pa.large_list(pa.float32())
METRICS = pa.map_(TEXT, pa.float64())
LABELS = pa.map_(TEXT, TEXT)

_EPISODE = [
    pa.field("step", pa.int32(), nullable=False),
    pa.field("episode_id", TEXT, nullable=False),
    pa.field("task_id", TEXT, nullable=False),
    pa.field("task_type", TEXT, nullable=False),
    pa.field("task_sha256", TEXT, nullable=False),
    pa.field("index", pa.int32(), nullable=False),  # rollout index g, replay index k or evaluation attempt
    pa.field("skill_id", TEXT),  # the skill in the prompt; null for student episodes
    pa.field("seed", pa.int64(), nullable=False),
    pa.field("fingerprint", TEXT),  # null when the environment could not start
    pa.field("won", pa.bool_()),  # null when the episode does not count (environment error)
    pa.field("score", pa.float64()),
    pa.field("metrics", METRICS),  # further figures by name; null where the environment has none
    pa.field("labels", LABELS),  # what describes the task, such as its hop class; null where nothing does
    pa.field("turns", pa.int32(), nullable=False),
    pa.field("invalid_turns", pa.int32(), nullable=False),
    pa.field("sampled_tokens", pa.int32(), nullable=False),
    pa.field("stop_reason", TEXT, nullable=False),  # done | max_turns | context | env_error | timeout
    pa.field("error", TEXT),
    pa.field("final_observation", TEXT),  # what the environment said last; null when it could not start
    pa.field("weights_sha256", TEXT, nullable=False),
]

_TURN = [
    pa.field("step", pa.int32(), nullable=False),
    pa.field("episode_id", TEXT, nullable=False),
    pa.field("task_id", TEXT, nullable=False),
    pa.field("turn", pa.int32(), nullable=False),
    pa.field("observation", TEXT, nullable=False),
    pa.field("admissible_commands", pa.large_list(TEXT), nullable=False),
    # append_only: the ids added since the last sampled id; window: the whole prompt. Never sampled, never trained on.
    pa.field("prompt_token_ids", TOKENS, nullable=False),
    pa.field("token_ids", TOKENS, nullable=False),  # exactly the sampled ids: the loss mask is these and nothing else
    pa.field("behaviour_logprobs", FLOATS, nullable=False),  # at `temperature`, one per sampled id
    pa.field("temperature", pa.float32(), nullable=False),
    pa.field("text", TEXT, nullable=False),
    pa.field("action", TEXT),
    pa.field("valid", pa.bool_(), nullable=False),
    pa.field("invalid_reason", TEXT),
    pa.field("stop_reason", TEXT, nullable=False),  # eos | length
    pa.field("seed", pa.int64(), nullable=False),
]

_SKILL = [
    pa.field("step", pa.int32(), nullable=False),
    pa.field("skill_id", TEXT, nullable=False),
    pa.field("task_id", TEXT, nullable=False),
    pa.field("task_type", TEXT, nullable=False),
    pa.field("source_episode_id", TEXT),  # null when the task had no usable evidence episode
    pa.field("source_won", pa.bool_()),
    pa.field("prompt_token_ids", TOKENS, nullable=False),
    pa.field("token_ids", TOKENS, nullable=False),
    pa.field("behaviour_logprobs", FLOATS, nullable=False),
    pa.field("temperature", pa.float32(), nullable=False),
    pa.field("text", TEXT, nullable=False),
    pa.field("summary", TEXT),
    pa.field("skill", TEXT),  # null when it did not parse
    # Why there is no skill: no_evidence | context | non_finite | no_json | empty | too_short | length.
    pa.field("reason", TEXT),
    pa.field("stop_reason", TEXT),
    pa.field("seed", pa.int64(), nullable=False),
    pa.field("weights_sha256", TEXT, nullable=False),
]

_GAIN = [
    pa.field("step", pa.int32(), nullable=False),
    pa.field("task_id", TEXT, nullable=False),
    pa.field("task_type", TEXT, nullable=False),
    pa.field("skill_id", TEXT),
    pa.field("controls", pa.int32(), nullable=False),  # episodes that really count
    pa.field("replays", pa.int32(), nullable=False),
    pa.field("control_utility", pa.float64()),
    pa.field("replay_utility", pa.float64()),
    pa.field("replay_gain", pa.float64()),  # g_q
    pa.field("noise_variance", pa.float64()),  # s_q^2
    pa.field("shrinkage", pa.float64()),  # B_q
    pa.field("shrunk_gain", pa.float64()),  # g~_q
    pa.field("skill_reward", pa.float64()),  # r_q
    pa.field("trust", pa.float64(), nullable=False),  # omega_q
    pa.field("reason", TEXT),  # why the gain is null
]

_TYPE_STATS = [
    pa.field("step", pa.int32(), nullable=False),
    pa.field("task_type", TEXT, nullable=False),  # "*" pools all types
    pa.field("steps_seen", pa.int32(), nullable=False),
    pa.field("state", TEXT, nullable=False),  # JSON of the uncorrected accumulators, exact float64
    pa.field("mean_gain", pa.float64()),  # m_c, bias-corrected
    pa.field("replay_variance", pa.float64()),
    pa.field("control_variance", pa.float64()),
    pa.field("gain_variance", pa.float64()),  # d_c
    pa.field("between_variance", pa.float64()),  # tau_c^2
]

_TRAIN_ROW = [
    pa.field("step", pa.int32(), nullable=False),
    pa.field("kind", TEXT, nullable=False),  # rollout | skill
    pa.field("episode_id", TEXT),
    pa.field("turn", pa.int32()),  # window rows; null where a row is a whole episode
    pa.field("skill_id", TEXT),
    pa.field("task_id", TEXT, nullable=False),
    pa.field("loss_tokens", pa.int32(), nullable=False),
    pa.field("reward", pa.float64()),
    pa.field("advantage", pa.float64()),
    pa.field("trust", pa.float64()),
    pa.field("skill_reward", pa.float64()),
    pa.field("teacher_logprobs", FLOATS),
    pa.field("trainer_logprobs", FLOATS),
]

_METRIC = [
    pa.field("step", pa.int32(), nullable=False),
    pa.field("name", TEXT, nullable=False),
    pa.field("value", pa.float64()),
]

_EVAL = [
    *_EPISODE,
    pa.field("panel", TEXT, nullable=False),
    pa.field("panel_sha256", TEXT, nullable=False),
]

_TIMING = [
    pa.field("step", pa.int32(), nullable=False),
    pa.field("stage", TEXT, nullable=False),
    pa.field("attempt", TEXT, nullable=False),
    pa.field("name", TEXT, nullable=False),
    pa.field("value", pa.float64(), nullable=False),
]

VERSION = 2


def _schema(fields: list[pa.Field], name: str) -> pa.Schema:
    return pa.schema(fields, metadata={"rsipo.table": name, "rsipo.version": str(VERSION)})


_FIELDS = {
    "rollouts": _EPISODE,
    "rollout_turns": _TURN,
    "replays": _EPISODE,
    "replay_turns": _TURN,
    "skills": _SKILL,
    "gains": _GAIN,
    "type_stats": _TYPE_STATS,
    "train_rows": _TRAIN_ROW,
    "train_metrics": _METRIC,
    "evals": _EVAL,
    "eval_turns": _TURN,
    "timings": _TIMING,
}

SCHEMAS: dict[str, pa.Schema] = {name: _schema(fields, name) for name, fields in _FIELDS.items()}
