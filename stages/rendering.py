"""From an environment's wording to token ids, and back from sampled ids to text.

Nothing that was sampled is ever tokenised again. In `append_only` mode an episode is one growing sequence: the opening
prompt, the sampled reply, exactly the tokens the chat template puts between that reply and the next one, and so on. In
`window` mode every turn has a prompt of its own. Text from environments and models cannot smuggle in control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from data.environments import Observation, Prompts, Turn
from data.tasks import Task
from schemas.errors import ConfigError, RsipoError

if TYPE_CHECKING:
    from stages.episode_records import TurnRecord

_MISSING = frozenset({"", "none", "nan", "null"})
_PROBE_REPLIES = ("<think>first</think>\n<action>look</action>", "<think>second</think>\n<action>wait</action>")


class Renderer:
    """Prompts of one environment in the format of one tokenizer.

    `mode` "window" or "append_only"; `history` is H, the past turns of a window prompt; `enable_thinking` is handed to chat
    templates. Raises ConfigError for a tokenizer without a usable chat template, with more tokens than `vocabulary_size`,
    and in `append_only` mode for a template that changes earlier turns when new ones are added. `reply_ends` are ids that
    end a reply besides the template's and the tokenizer's own (see `generation_eos_ids`).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Prompts,
        mode: Literal["window", "append_only"],
        history: int,
        enable_thinking: bool,
        *,
        vocabulary_size: int | None = None,
        reply_ends: Iterable[int] = (),
    ) -> None:
        if mode not in ("window", "append_only"):
            raise ConfigError("unknown prompt mode", where="prompt.mode", expected="window or append_only", found=mode)
        if history < 0:
            raise ConfigError("the history is negative", where="prompt.history", expected=">= 0", found=history)
        if vocabulary_size is not None:
            check_vocabulary(tokenizer, vocabulary_size)
        self.tokenizer, self.prompts, self.mode, self.history = tokenizer, prompts, mode, history
        self._chat = ChatFormat(tokenizer, enable_thinking)
        self.eos_ids: tuple[int, ...] = self._chat.eos_ids
        self._reply_ends = frozenset([*self.eos_ids, *reply_ends])
        if mode == "append_only":
            self._chat.check_append_only(prompts.system)

    def opening_ids(self, task: Task, first: Observation, skill: str | None) -> list[int]:
        """`append_only`: the whole prompt of the first turn."""
        _expect_text(task.text, "the task's text")
        _expect_text(first.text, "the first observation")
        return self._prompt_ids(self.prompts.opening(task, first, _expect_skill(skill)))

    def follow_up_ids(self, reply_ended_by_eos: bool, observation: Observation) -> list[int]:
        """`append_only`: the ids between the end of a sampled reply and the next reply.

        After a reply that was cut they begin with the end-of-turn id which the policy did not sample.
        """
        _expect_text(observation.text, "an observation")
        ids = self._chat.between_replies(self.prompts.system, self.prompts.follow_up(observation))
        end = self._chat.end_position(ids)
        return ids[end + 1 :] if reply_ended_by_eos else ids

    def window_ids(
        self, task: Task, history: Sequence[Turn], turns_taken: int, observation: Observation, skill: str | None
    ) -> list[int]:
        """`window`: the whole prompt of a turn. Of `history` (oldest first) the last H turns are shown."""
        _expect_text(task.text, "the task's text")
        _expect_text(observation.text, "an observation")
        shown = list(history)[len(history) - min(self.history, len(history)) :]
        return self._prompt_ids(self.prompts.window(task, shown, turns_taken, observation, _expect_skill(skill)))

    def skill_request_ids(
        self, task: Task, turns: Sequence[Turn | TurnRecord], final: Observation, won: bool
    ) -> list[int]:
        """The prompt that asks the policy for a skill from one finished episode (either kind of turn is fine)."""
        _expect_text(task.text, "the task's text")
        past = [as_turn(turn) for turn in turns]
        return self._prompt_ids(self.prompts.skill_request(task, past, final, won))

    def chat_ids(self, texts: Sequence[str], system: str | None) -> list[int]:
        """The prompt after a given conversation (user and assistant texts in turns, a user's last); for annotations."""
        return self._chat.encode(self._chat.render(*texts, system=system))

    def answer_ids(self, text: str) -> list[int]:
        """Ids of an answer that was written elsewhere, with the end-of-turn id: what the policy is to sample."""
        return [*self._chat.encode(self._chat.plain(_expect_text(text, "an answer"))), self.eos_ids[0]]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, control tokens shown as they are; an id that ends replies is left out at the end."""
        kept = ids[:-1] if len(ids) and ids[-1] in self._reply_ends else ids
        return self.tokenizer.decode(list(kept), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _prompt_ids(self, user: str) -> list[int]:
        return self._chat.encode(self._chat.render(_expect_text(user, "a user message"), system=self.prompts.system))


class ChatFormat:
    """A tokenizer's chat template: rendering, the end of a turn, and what stands between two replies."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, enable_thinking: bool = False) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template",
                where="model.path",
                expected="chat_template in tokenizer_config.json or chat_template.jinja",
                remedy="use an instruction-tuned model, or add a template to the directory",
            )
        self.tokenizer, self.enable_thinking = tokenizer, enable_thinking
        self._control = tuple(sorted(_control_texts(tokenizer), key=len, reverse=True))
        self._takes_system = self._keeps_system()
        self.eos_ids = self._end_of_turn_ids()

    def render(self, *turns: str, system: str | None, prompt: bool = True) -> str:
        """The template's text for alternating user and assistant turns, the assistant's opening added if `prompt`."""
        messages = [
            {"role": "assistant" if index % 2 else "user", "content": self.plain(text)}
            for index, text in enumerate(turns)
        ]
        if system is not None and self._takes_system:
            messages.insert(0, {"role": "system", "content": self.plain(system)})
        elif system is not None:
            messages[0]["content"] = f"{self.plain(system)}\n\n{messages[0]['content']}"
        return self._apply(messages, prompt)

    def plain(self, text: str) -> str:
        """`text` with a blank put into every control token, so that it cannot end a turn or begin another one."""
        for control in self._control:
            text = text.replace(control, f"{control[0]} {control[1:]}")
        return text

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text; the template has already written the special tokens."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def between_replies(self, system: str | None, user: str) -> list[int]:
        """Ids from the end of a reply's text to the beginning of the next reply, end-of-turn included."""
        return self.encode(self._between(system, user))

    def end_position(self, ids: Sequence[int]) -> int:
        """Index of the first end-of-turn id in `ids`. Raises ConfigError when the template writes none."""
        for index, token in enumerate(ids):
            if token in self.eos_ids:
                return index
        raise ConfigError("the chat template writes no end of turn after a reply", where="prompt.mode=append_only")

    def check_append_only(self, system: str | None) -> None:
        """Raise ConfigError unless adding turns leaves the rendering of earlier ones as it was."""
        between = self._between(system, "y")
        self.end_position(self.encode(between))
        whole = self.render("x", system=system) + _PROBE_REPLIES[0] + between + _PROBE_REPLIES[1]
        later = self._rest("x", _PROBE_REPLIES[0], "y", _PROBE_REPLIES[1], "z", system=system, before=whole)
        if later != self._between(system, "z"):
            raise self._not_append_only("the text between two replies depends on the turn")

    def _between(self, system: str | None, user: str) -> str:
        before = self.render("x", system=system) + _PROBE_REPLIES[0]
        return self._rest("x", _PROBE_REPLIES[0], user, system=system, before=before)

    def _rest(self, *turns: str, system: str | None, before: str) -> str:
        text = self.render(*turns, system=system)
        if not text.startswith(before):
            raise self._not_append_only("earlier turns are rewritten when a turn is added")
        return text[len(before) :]

    def _not_append_only(self, found: str) -> ConfigError:
        return ConfigError(
            "the chat template cannot grow turn by turn",
            where="prompt.mode=append_only",
            expected="a template that only appends",
            found=found,
            remedy="set prompt.mode=window",
        )

    def _apply(self, messages: list[dict[str, str]], prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, enable_thinking=self.enable_thinking
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise ConfigError("the chat template fails", where="model.path", found=f"{error}") from error

    def _keeps_system(self) -> bool:
        """Whether the template shows a system message; some refuse it, some drop it."""
        messages = [{"role": "system", "content": "qsystemq"}, {"role": "user", "content": "x"}]
        try:
            return "qsystemq" in self._apply(messages, True)
        except ConfigError:
            return False

    def _end_of_turn_ids(self) -> tuple[int, ...]:
        """The special token the template writes right after a reply, and the tokenizer's own end of sequence."""
        text = self._apply(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "qreplyq"}], prompt=False
        )
        special = set(self.tokenizer.all_special_ids) | set(_added_ids(self.tokenizer))
        after = [token for token in self.encode(text.rpartition("qreplyq")[2]) if token in special][:1]
        own = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        ids = tuple(dict.fromkeys([*after, *own]))
        if not ids:
            raise ConfigError("neither the chat template nor the tokenizer names an end of turn", where="model.path")
        return ids


def next_prompt_ids(
    renderer: Renderer, task: Task, turns: Sequence[TurnRecord], observation: Observation, skill: str | None
) -> list[int]:
    """The ids to add for the turn after `turns`: the whole prompt in `window` mode and at turn 0, else what stands between
    the last sampled id and the next one."""
    if renderer.mode == "window":
        return renderer.window_ids(task, [as_turn(turn) for turn in turns], len(turns), observation, skill)
    if not turns:
        return renderer.opening_ids(task, observation, skill)
    return renderer.follow_up_ids(turns[-1].stop_reason == "eos", observation)


def turn_prompt_ids(
    renderer: Renderer, task: Task, turns_before: Sequence[TurnRecord], turn: TurnRecord, skill: str | None
) -> list[int]:
    """The prompt ids of a recorded turn, with or without a skill (see `next_prompt_ids` for what they cover).

    Without a skill they equal `turn.prompt_token_ids` of a student episode exactly.
    """
    observation = Observation(turn.observation, tuple(turn.admissible_commands))
    return next_prompt_ids(renderer, task, turns_before, observation, skill)


def as_turn(turn: Turn | TurnRecord) -> Turn:
    """A recorded turn as prompts show it."""
    return turn if isinstance(turn, Turn) else Turn(turn.observation, turn.text, turn.action)


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end a reply. Raises ConfigError without a chat template."""
    return ChatFormat(tokenizer).eos_ids


def generation_eos_ids(model_dir: Path) -> tuple[int, ...]:
    """The ids at which a model's own settings end a reply: some models name more than the template writes.

    Those of `generation_config.json`, or of `config.json` where there is no such file. ConfigError if it is not JSON.
    """
    for path in (model_dir / "generation_config.json", model_dir / "config.json"):
        if path.is_file():
            try:
                ids = json.loads(path.read_text()).get("eos_token_id")
            except (OSError, ValueError, AttributeError) as error:
                raise ConfigError("cannot read the model's settings", where=str(path), found=str(error)) from error
            return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocabulary_size: int) -> None:
    """Raise ConfigError when the tokenizer knows ids for which the model has no embedding."""
    highest = max(tokenizer.get_vocab().values())
    if highest >= vocabulary_size:
        raise ConfigError(
            "the tokenizer does not fit the model",
            where="model.path",
            expected=f"token ids below {vocabulary_size} (rows of the embedding)",
            found=f"id {highest}",
            remedy="use the tokenizer the model was trained with",
        )


def _control_texts(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return {text for text in added | set(tokenizer.all_special_tokens) if len(text) > 1 and not text.isspace()}


def _added_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]


def _expect_text(text: str, what: str) -> str:
    if not isinstance(text, str) or text.strip().lower() in _MISSING:
        raise RsipoError(f"{what} is missing", expected="text", found=repr(text))
    return text


def _expect_skill(skill: str | None) -> str | None:
    return None if skill is None else _expect_text(skill, "the skill")
