"""A world of a few words, an engine that can write skills, and a random policy that speaks the words: for tests of stages.

A task names a number; an episode is won by an action whose number has the same remainder by `MODULUS`. Everything is a
function of task and actions, and with `drift` (an option) each start differs, as a broken environment's would.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.environments import Observation, ParsedReply, StepResult, Turn
from data.tasks import Panel, Task
from schemas.config import Config
from schemas.config_loading import config_from_mapping
from stages.engines import GenerationRequest, GenerationResult
from stages.engines.transformers_engine import TransformersEngine

MODULUS = 4
TYPES = ("even", "odd")
SPECIAL = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<unk>"]
WORDS = ["task", "turn", "see", "again", "skill:", "summary:", "write", "yes", "no", "do"]
NUMBERS = [f"n{index}" for index in range(61 - len(SPECIAL) - len(WORDS))]
_STARTS = itertools.count()


def small_task(number: int) -> Task:
    """Task `number` of the world."""
    return Task(f"task-{number:03d}", TYPES[number % 2], "train", f"task n{number % len(NUMBERS)}", {"number": number})


class SmallPrompts:
    """Prompts in the world's words."""

    system = None

    def opening(self, task: Task, first: Observation, skill: str | None) -> str:
        return f"{self._task(task, skill)} {first.text}"

    def follow_up(self, observation: Observation) -> str:
        return observation.text

    def window(
        self, task: Task, history: Sequence[Turn], turns_taken: int, observation: Observation, skill: str | None
    ) -> str:
        past = " ".join(f"{turn.observation} do {turn.action or 'no'}" for turn in history)
        return f"{self._task(task, skill)} turn {past} {observation.text}"

    def skill_request(self, task: Task, turns: Sequence[Turn], final: Observation, won: bool) -> str:
        return f"write {task.text} {'yes' if won else 'no'} {final.text}"

    @staticmethod
    def _task(task: Task, skill: str | None) -> str:
        return task.text if skill is None else f"{task.text} skill: {skill}"


@dataclass
class SmallSession:
    """One live episode."""

    task: Task
    version: str
    start: int
    errors: frozenset[int]
    turns: int = 0
    first_observation: Observation = field(init=False)

    def __post_init__(self) -> None:
        self.first_observation = Observation(f"see n{self.task.payload['number'] % len(NUMBERS)}", ("n0", "n1"))

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.task.sha256} {self.version} {self.start}".encode()).hexdigest()

    def step(self, action: str) -> StepResult:
        if self.task.payload["number"] in self.errors:
            raise RuntimeError("the world broke")
        self.turns += 1
        won = int(action.removeprefix("n")) % MODULUS == self.task.payload["number"] % MODULUS
        return StepResult(Observation(f"see {action} again"), won, won)

    def reject(self, reason: str) -> StepResult:
        self.turns += 1
        return StepResult(Observation("see no again"), False, False)

    def close(self) -> None:
        pass


class SmallWorld:
    """See the module's docstring. `errors` names tasks whose every step raises; `drift` makes every start another state."""

    name = "small"
    prompts = SmallPrompts()

    def __init__(self, drift: bool = False, errors: Sequence[int] = (), version: str = "1") -> None:
        self.version, self.drift, self.errors = version, drift, frozenset(errors)

    def start(self, task: Task) -> SmallSession:
        return SmallSession(task, self.version, next(_STARTS) if self.drift else 0, self.errors)

    def parse_reply(self, text: str, *, cut: bool) -> ParsedReply:
        words = [word for word in text.split() if word.startswith("n") and word[1:].isdigit()]
        if cut:
            return ParsedReply(None, "cut")
        return ParsedReply(words[0]) if words else ParsedReply(None, "no_action")

    def panel(self, source: str, *, limit: int | None = None) -> Panel:
        first, _, last = source.partition("-")
        return Panel.of(source, [small_task(number) for number in range(int(first), int(last))])


class SkilledEngine(TransformersEngine):
    """The engine of a random policy that cannot write: replies to skill requests are put into its mouth, and scored."""

    skill = "summary: n9 skill: n1 n2 n3 n4 n5 n6"
    silent_share = 3  # every third request gets a reply that is no skill

    def __init__(self, model_dir: Path | str, **options: object) -> None:
        super().__init__(model_dir, **options)  # type: ignore[arg-type]
        self.words = PreTrainedTokenizerFast.from_pretrained(model_dir)

    def generate(self, requests: Sequence[GenerationRequest], on_tokens: object = None) -> list[GenerationResult]:
        write = self.words.convert_tokens_to_ids("write")
        asked = [request for request in requests if write in request.prompt_ids and request.session is None]
        if len(asked) < len(requests):
            return super().generate(requests)
        return [self._written(request) for request in requests]

    def _written(self, request: GenerationRequest) -> GenerationResult:
        text = "n1 n2" if request.seed % self.silent_share == 0 else self.skill
        ids = [*self.words(text, add_special_tokens=False)["input_ids"], self.words.eos_token_id]
        prompt = list(request.prompt_ids)
        scores = self.score([prompt + ids], request.temperature)[0]
        return GenerationResult(ids, list(scores[len(prompt) - 1 :]), "eos")


def write_small_policy(directory: Path, *, seed: int = 0) -> Path:
    """A random policy that speaks the world's words."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # Not Qwen2: transformers would read the tokenizer with that family's class, which splits words into bytes.
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(SPECIAL) + len(WORDS) + len(NUMBERS),
                hidden_size=24,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=256,
                initializer_range=0.3,
            )
        )
    model.save_pretrained(directory)
    _lean_towards_short_numbers(directory)
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS, *NUMBERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        additional_special_tokens=SPECIAL[:3],
    )
    fast.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|> {% endif %}"
    )
    fast.save_pretrained(directory)
    return directory


def _lean_towards_short_numbers(directory: Path) -> None:
    """Turn one dimension of the residual stream into a constant by which the head prefers numbers and ending the turn."""
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 3.0
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0
    head = tensors["lm_head.weight"]
    head[:, 0] = 0.0
    head[SPECIAL.index("<|end|>"), 0] = 4.0
    head[len(SPECIAL) + len(WORDS) :, 0] = 2.0
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def small_config(model: Path, **changes: object) -> Config:
    """A configuration for the world; `changes` are dotted keys with `__` for the dot."""
    values: dict[str, dict[str, object]] = {
        "run": {"steps": 2, "threads": 1, "keep_last": 5},
        "model": {"path": str(model)},
        "env": {"name": "tests.small_world:SmallWorld", "max_turns": 4},
        "tasks": {"train": "0-12", "evaluate": "20-29", "per_step": 4},
        "prompt": {"mode": "append_only", "max_prompt_tokens": 96, "max_reply_tokens": 6, "max_episode_tokens": 128},
        "engine": {"name": "tests.small_world:SkilledEngine", "batch_sequences": 16},
        "rollout": {"group_size": 4, "groups_per_part": 2},
        "replay": {"replays": 3, "max_skill_tokens": 16},
        "optimizer": {"lr": 1e-3},
        "evaluate": {"every": 1, "attempts": 2, "temperature": 1.0, "batch_episodes": 7},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        values.setdefault(section, {})[key] = value
    return config_from_mapping(values)
