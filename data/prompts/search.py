"""The search world's prompts in two wordings.

`StandardPrompts` is for instruction-tuned models, `CompactPrompts` for the bundled small policy. A skill is a titled block
right after the question; with and without it the rest is the same byte for byte (method section 4).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from data.environments import Observation, Turn
from data.tasks import Task

INVITATION = "Search or answer."
OPEN, CLOSE = "<information>", "</information>"

_SETTING = (
    "Find the answer with the help of a search engine. What you need may be in several places: a search can build on what "
    "an earlier one has found. You have few turns, and the answer ends the task."
)
_REPLY_FORMAT = (
    "Reply with your reasoning and then exactly one search or one answer, in one of these two forms:\n"
    "<think>what you know, what is missing, what to do next</think>\n"
    "<search>words to look for</search>\n"
    "or\n"
    "<think>why this is the answer</think>\n"
    "<answer>only the answer, in as few words as possible</answer>\n"
    f"What a search finds comes back between {OPEN} and {CLOSE}."
)
_WISH_AFTER_SUCCESS = (
    'In "skill" give a short workflow for questions of this kind: what to search for, in which order, when to answer, in '
    "general words, so that it also works for another question."
)
_WISH_AFTER_FAILURE = (
    'In "skill" give the rules that avoid this failure for questions of this kind: what to search for, what not to do, in '
    "general words, so that they also hold for another question."
)


class StandardPrompts:
    """Full instructions; implements `data.environments.Prompts`."""

    @property
    def system(self) -> str | None:
        """No system message."""
        return None

    def opening(self, task: Task, first: Observation, skill: str | None) -> str:
        """Question, skill, how to play."""
        return f"{self._task(task, skill)}\n{_SETTING}\n{_REPLY_FORMAT}"

    def follow_up(self, observation: Observation) -> str:
        """What came back."""
        return observation.text

    def window(
        self, task: Task, history: Sequence[Turn], turns_taken: int, observation: Observation, skill: str | None
    ) -> str:
        """Question, skill, the last turns with what they found, the present observation, how to play."""
        lines = [self._task(task, skill), _SETTING, f"Turns taken so far: {turns_taken}."]
        for number, turn in enumerate(history, start=turns_taken - len(history) + 1):
            if turn.observation != INVITATION:
                lines.append(turn.observation)
            lines.append(f"[{number}] {_action(turn)}")
        lines += [observation.text, "", _REPLY_FORMAT]
        return "\n".join(lines)

    def skill_request(self, task: Task, turns: Sequence[Turn], final: Observation, won: bool) -> str:
        """The finished episode and the request for JSON with `summary` and `skill`."""
        lines = [
            f"Question: {task.text}",
            "Below is one attempt to answer this question with a search engine. It ended in",
        ]
        lines[-1] += f" {'success' if won else 'failure'} after {len(turns)} turns.\n"
        for number, turn in enumerate(turns, start=1):
            if turn.observation != INVITATION:
                lines.append(turn.observation)
            lines.append(f"[{number}] {_action(turn)}")
        lines.append(final.text)
        return "\n".join(lines) + (
            "\n\nWrite down what should be remembered from it. Answer with one JSON object and nothing else, with the two "
            'text fields "summary" and "skill". In "summary" say in one or two sentences what happened. '
            + (_WISH_AFTER_SUCCESS if won else _WISH_AFTER_FAILURE)
        )

    @staticmethod
    def _task(task: Task, skill: str | None) -> str:
        block = f"Skill learned from an earlier attempt:\n{skill.strip()}\n" if skill and skill.strip() else ""
        return f"Question: {task.text}\n{block}"


class CompactPrompts:
    """As few tokens as possible; implements `data.environments.Prompts`."""

    @property
    def system(self) -> str | None:
        """No system message."""
        return None

    def opening(self, task: Task, first: Observation, skill: str | None) -> str:
        """`question: ...`, `skill: ...` if there is one, `search or answer`."""
        return f"{self._task(task, skill)}search or answer"

    def follow_up(self, observation: Observation) -> str:
        """One line a passage."""
        return _plain(observation.text)

    def window(
        self, task: Task, history: Sequence[Turn], turns_taken: int, observation: Observation, skill: str | None
    ) -> str:
        """The opening's lines, the last turns as `> action` after what they were based on, the present observation."""
        lines = [f"{_plain(turn.observation)}\n> {_action(turn)}" for turn in history]
        return self._task(task, skill) + "\n".join([*lines, _plain(observation.text)])

    def skill_request(self, task: Task, turns: Sequence[Turn], final: Observation, won: bool) -> str:
        """`write a skill`, the question, the outcome, the actions."""
        actions = ", ".join(_action(turn) for turn in turns)
        return f"write a skill\nquestion: {task.text}\noutcome: {'success' if won else 'failure'}\nactions: {actions}"

    @staticmethod
    def _task(task: Task, skill: str | None) -> str:
        block = f"skill: {skill.strip()}\n" if skill and skill.strip() else ""
        return f"question: {task.text}\n{block}"


_NUMBER = re.compile(r"^\d+\. ", re.MULTILINE)


def _plain(observation: str) -> str:
    """Passages as `- title: text` lines; the invitation in lower case; any other text as it is.

    >>> _plain("<information>\\n1. Rome: A city.\\n2. Paris: Another.\\n</information>")
    '- Rome: A city.\\n- Paris: Another.'
    """
    if observation == INVITATION:
        return "search or answer"
    if not (observation.startswith(f"{OPEN}\n") and observation.endswith(f"\n{CLOSE}")):
        return observation
    return _NUMBER.sub("- ", observation[len(OPEN) + 1 : -len(CLOSE) - 1])


def _action(turn: Turn) -> str:
    return turn.action if turn.action is not None else "(invalid reply)"
