"""The configuration of a run: frozen typed models, one default in one place, unknown keys refused.

Help texts, the docs page and the resolved `config.toml` come from these fields. Lines marked [P], [S] or [O] say whether a
default is the paper's, inherited from SEED, or our own choice (see docs/method.md). Loading, `--set` and nearest-name
messages live in `schemas.config_loading`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

CONFIG_VERSION: Literal[1] = 1

# What the package has under a name; everything else is an import string. The classes are where schemas cannot look.
ENVIRONMENTS = ("household", "search")
ENGINES = ("transformers", "vllm")
ADVANTAGES = ("grpo", "opid", "rlsd")
GATES = ("constant", "sigmoid")

UNKNOWN_NAME = "unknown_name"  # the type of the fault; `schemas.config_loading` words it
_IMPORT_STRING = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _name_of(*names: str) -> AfterValidator:
    """One of `names`, or an import string `package.module:Class`; nothing else passes."""

    def check(value: str) -> str:
        if value not in names and not _IMPORT_STRING.fullmatch(value):
            raise PydanticCustomError(UNKNOWN_NAME, "unknown name", {"names": names})
        return value

    return AfterValidator(check)


class Section(BaseModel):
    """Base of every section: immutable, unknown keys refused, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class RunSection(Section):
    seed: int = Field(0, ge=0, description="Seed from which every random draw of the run is derived.")
    steps: int = Field(150, ge=1, description="Iterations of `rsipo loop`. [P] 150")
    keep_last: int = Field(3, ge=1, description="Checkpoints with optimiser state kept; older ones are removed.")
    keep_every: int = Field(
        0, ge=0, description="Also keep every n-th checkpoint for ever; 0 keeps none besides the last."
    )
    trackers: list[str] = Field(
        default_factory=list,
        description="Where `loop` also sends its figures: `jsonl` or import strings `module:Class`; the record needs none.",
    )
    threads: int = Field(0, ge=0, description="CPU threads for torch; 0 uses every core the process may use.")


class ModelSection(Section):
    path: str = Field(
        "bundled:household-tiny",
        description="HF model directory, hub name, or `bundled:NAME` for a model in the package.",
    )
    revision: str | None = Field(None, description="Hub revision; ignored for directories.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Parameter type of the forward pass.")


class EnvSection(Section):
    name: Annotated[str, _name_of(*ENVIRONMENTS)] = Field(
        "household", description="Built-in environment or import string `module:Class`."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the environment's class.")
    max_turns: int = Field(30, ge=1, description="Turns after which an episode ends. [S] 30 household, 4 search")
    max_error_share: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Share of episodes with an environment error above which `rollout` and `replay` fail and play the step "
        "anew; `evaluate` keeps and reports its result, and exits with 1. [O]",
    )


class TasksSection(Section):
    train: str = Field("generated:size=small,split=train,seed=1,count=512", description="Source of the training panel.")
    evaluate: str = Field(
        "generated:size=small,split=valid_seen,seed=2,count=120", description="Source of the held-out panel."
    )
    per_step: int = Field(16, ge=1, description="Tasks per iteration. [P] 16 household, 128 search")


class PromptSection(Section):
    mode: Literal["window", "append_only"] = Field(
        "window",
        description="`window`: one row per turn with the last H turns [S]; `append_only`: one growing sequence.",
    )
    history: int = Field(5, ge=0, description="H, past turns shown in a window prompt. [S] 5 household, 4 search")
    max_prompt_tokens: int = Field(
        2048,
        ge=16,
        description="Longest prompt of a turn in `window` mode; no effect in `append_only`. [S] 2048 household, 4096 search",
    )
    max_reply_tokens: int = Field(512, ge=1, description="Longest reply of a turn. [S] 512")
    max_episode_tokens: int = Field(
        16384, ge=32, description="Longest sequence in `append_only` mode; reaching it ends the episode. [O]"
    )
    enable_thinking: bool = Field(False, description="Passed to chat templates that have a thinking switch. [P] off")


class EngineSection(Section):
    name: Annotated[str, _name_of(*ENGINES)] = Field(
        "transformers", description="`transformers`, `vllm`, or an import string `module:Class`."
    )
    batch_sequences: int = Field(128, ge=1, description="Most sequences decoded together by the engine.")
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the engine's class.")
    max_logprob_gap: float = Field(
        0.05,
        gt=0,
        description="Largest mean gap between engine and trainer log-probabilities before a step is refused. [O]",
    )


class RolloutSection(Section):
    group_size: int = Field(8, ge=2, description="G, student episodes per task. [P] 8")
    temperature: float = Field(
        1.0, gt=0, description="Sampling temperature of rollouts, replays and their scores. [S] 1.0"
    )
    groups_per_part: int = Field(16, ge=1, description="Task groups that are played and published together.")


class ReplaySection(Section):
    replays: int = Field(4, ge=1, description="K, teacher episodes per checked skill. [O] 4")
    skill_temperature: float = Field(1.0, gt=0, description="Skills are sampled. [O] 1.0")
    max_skill_tokens: int = Field(512, ge=8, description="Longest written skill, in tokens. [O] 512")
    min_skill_words: int = Field(5, ge=1, description="A skill of fewer words is a parse failure. [S] 5")
    max_no_skill_share: float = Field(
        1.0, ge=0, le=1, description="Share of tasks without a usable skill above which the stage fails. [O]"
    )


class GainsSection(Section):
    speed_bonus: float = Field(
        0.2, ge=0, description="lambda_u in u = won * (1 + lambda_u * (1 - turns / max_turns)). [O] 0.2"
    )
    decay: float = Field(0.9, ge=0, lt=1, description="rho of the moving averages. [O] 0.9")
    trust_intercept: float = Field(
        1.0,
        ge=0,
        description="i in trust omega = clip(i + kappa * shrunk gain, 0, omega_max); without a gain omega is 1. [O] 1",
    )
    trust_slope: float = Field(2.0, ge=0, description="kappa of the trust. [P] 2")
    trust_max: float = Field(2.0, ge=1, description="omega_max of the trust. [P] 2")
    skill_reward: Literal["raw", "shrunk"] = Field("raw", description="r_q = g_q - m_c, or shrunk gain - m_c. [P] raw")
    skill_reward_clip: float = Field(2.0, gt=0, description="r_q is clipped to +- this. [O] 2")


class ObjectiveSection(Section):
    success_reward: float = Field(10.0, gt=0, description="Reward of a won episode. [S] 10 household, 1 search")
    invalid_penalty: float = Field(
        0.1, ge=0, description="Taken off for each invalid turn. [S] 0.1 household, 0.01 search"
    )
    advantage: Annotated[str, _name_of(*ADVANTAGES)] = Field(
        "grpo",
        description="Token credit of the policy gradient: `grpo` (the group advantage on every token), `opid`, `rlsd`, or an "
        "import string of an `AdvantagePart`. [P] grpo",
    )
    advantage_options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the advantage's class."
    )
    advantage_norm: Literal["std", "none"] = Field(
        "std", description="Divide group advantages by the group's std, or not. [S] std"
    )
    advantage_eps: float = Field(
        1e-6, ge=0, description="Added to the group's std before group advantages are divided by it. [O] 1e-6"
    )
    group_stats: Literal["rollouts", "rows"] = Field(
        "rollouts", description="One vote per rollout [O], or per turn row [S]."
    )
    grpo_coef: float = Field(1.0, ge=0, description="Coefficient of the GRPO term. [P] 1")
    eps_clip: float = Field(0.2, gt=0, lt=1, description="Clip range of the surrogate. [S] 0.2")
    opsd_coef: float = Field(0.01, ge=0, description="lambda_opsd. [S] 0.01")
    opsd_weight: Literal["trust", "one"] = Field(
        "trust", description="What a task's gates are multiplied by: `trust` (omega) or `one`. [P] trust"
    )
    opsd_gate: Annotated[str, _name_of(*GATES)] = Field(
        "sigmoid",
        description="Gate of each token: `sigmoid` (of beta_gate * Delta), `constant` (0.5), or an import string of a "
        "`DistillationWeight`. [S] sigmoid",
    )
    beta_gate: float = Field(5.0, ge=0, description="Slope of the `sigmoid` gate; belongs to no other gate. [S] 5")
    skill_coef: float = Field(0.1, ge=0, description="lambda_skill. [O] 0.1")
    kl_coef: float = Field(
        0.01,
        ge=0,
        description="beta_kl to the initial policy; 0 skips the reference pass. [S] 0.01 household, 0.001 search",
    )
    loss_agg: Literal["token_mean", "sequence_mean"] = Field(
        "token_mean",
        description="Normaliser of token losses: of all tokens of an optimiser step, or first within each row. [O]",
    )


class OptimizerSection(Section):
    lr: float = Field(1e-6, gt=0, description="Peak learning rate. [P] 1e-6")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="Learning-rate schedule over run.steps. [O]"
    )
    warmup_steps: int = Field(0, ge=0, description="Steps in which the learning rate rises linearly. [O]")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of AdamW, times the learning rate. [O]")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's average of gradients. [O]")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of AdamW's average of squared gradients. [O]")
    eps: float = Field(1e-8, gt=0, description="Added to AdamW's denominator. [O]")
    max_grad_norm: float = Field(1.0, gt=0, description="The norm of the whole gradient is clipped to this. [O]")


class LearnerSection(Section):
    processes: int = Field(1, ge=1, description="Training processes (one per GPU); 1 trains in the calling process.")
    micro_batch_tokens: int = Field(16384, ge=64, description="Most padded tokens of one forward-backward pass.")
    minibatch_rows: int | None = Field(
        None,
        ge=1,
        description="Rows per optimiser step; unset is one step an iteration. [O] unset; [S] 256 household, 512 search",
    )
    gradient_checkpointing: bool = Field(False, description="Trade time for memory in the backward pass.")
    logits_chunk: int = Field(1024, ge=16, description="Positions whose logits are held at once.")


class EvaluateSection(Section):
    temperature: float = Field(0.4, ge=0, description="Sampling temperature; 0 is greedy. [S] 0.4")
    attempts: int = Field(1, ge=1, description="Episodes of each task. [O] 1")
    seed: int = Field(
        1234, ge=0, description="Seed of evaluation alone; results depend on (weights, panel, seed) only."
    )
    every: int = Field(
        10,
        ge=0,
        description="`loop` evaluates before the first step, after every n-th and after the last; 0 never. [O]",
    )
    batch_episodes: int = Field(128, ge=1, description="Episodes played together; does not change any result.")


class SftSection(Section):
    epochs: int = Field(3, ge=1, description="Passes over the examples that are not held out. [S] 3")
    lr: float = Field(5e-6, gt=0, description="Peak learning rate. [S] 5e-6")
    batch_rows: int = Field(8, ge=1, description="Examples of one optimiser step. [S] 8")
    max_length: int = Field(
        8192, ge=32, description="Longest example in tokens; longer ones are rejected. [S] 8192 household, 12288 search"
    )
    held_out: float = Field(0.1, gt=0, lt=1, description="Share of examples held out. [S] 10 %")
    warmup_share: float = Field(
        0.03, ge=0, lt=1, description="Share of the optimiser steps in which the learning rate rises linearly. [O]"
    )
    max_duplicate_share: float = Field(
        0.5, ge=0, le=1, description="Share of duplicate examples above which the stage fails. [O]"
    )
    min_unique_skills: int = Field(2, ge=1, description="Distinct skills below which the stage fails. [O]")


class Config(Section):
    """The whole configuration; `version` guards run directories across releases."""

    version: Literal[1] = CONFIG_VERSION
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    env: EnvSection = EnvSection()
    tasks: TasksSection = TasksSection()
    prompt: PromptSection = PromptSection()
    engine: EngineSection = EngineSection()
    rollout: RolloutSection = RolloutSection()
    replay: ReplaySection = ReplaySection()
    gains: GainsSection = GainsSection()
    objective: ObjectiveSection = ObjectiveSection()
    optimizer: OptimizerSection = OptimizerSection()
    learner: LearnerSection = LearnerSection()
    evaluate: EvaluateSection = EvaluateSection()
    sft: SftSection = SftSection()

    @model_validator(mode="after")
    def _arithmetic(self) -> Config:
        """Everything about batch shapes that can be known before anything runs."""
        if self.prompt.mode == "append_only" and self.prompt.max_episode_tokens <= self.prompt.max_reply_tokens:
            raise ValueError("prompt.max_episode_tokens must exceed prompt.max_reply_tokens")
        if self.optimizer.warmup_steps >= self.run.steps and self.optimizer.schedule != "constant":
            raise ValueError("optimizer.warmup_steps must be below run.steps")
        objective = self.objective
        if objective.opsd_gate != "sigmoid" and objective.beta_gate != ObjectiveSection().beta_gate:
            raise ValueError(
                f"objective.beta_gate is the slope of the sigmoid gate and would be ignored: expected "
                f"objective.opsd_gate sigmoid, found {objective.opsd_gate!r}; leave beta_gate out"
            )
        return self
