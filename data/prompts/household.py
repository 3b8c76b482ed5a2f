"""The household world's prompts in two wordings.

`StandardPrompts` is for instruction-tuned models, `CompactPrompts` for the bundled small policy, which learns the
format from demonstrations and pays for every token.

A skill is a titled block right after the task line; with and without it the rest is the same byte for byte, so that the
student's and the teacher's tokens align (method section 4). A missing value never shows as text.
"""

from __future__ import annotations

from collections.abc import Sequence

from data.environments import Observation, Turn
from data.tasks import Task

BANNER = "-= Welcome to TextWorld, ALFRED! =-"
_TASK_LINE = "Your task is to:"

_SETTING = "You act in a household through short text commands, one a turn."
_REPLY_FORMAT = (
    "Reply with your reasoning and then exactly one action, in this form:\n"
    "<think>what you know, what is missing, what to do next</think>\n"
    "<action>one admissible action, word for word</action>"
)

_WISH_AFTER_SUCCESS = (
    'In "skill" give a short workflow for tasks of this kind: the steps in order, in general words, so that it also '
    "works in another room."
)
_WISH_AFTER_FAILURE = (
    'In "skill" give the rules that avoid this failure in tasks of this kind: what to do, what not to do, in general '
    "words, so that they also hold in another room."
)


def room_text(first: Observation) -> str:
    """The first observation without banner and task line: only what there is to see.

    >>> room_text(Observation("-= Welcome to TextWorld, ALFRED! =-\\n\\nYou are here.\\n\\nYour task is to: rest."))
    'You are here.'
    """
    text = first.text.strip().removeprefix(BANNER)
    head, found, _ = text.rpartition(_TASK_LINE)
    return (head if found else text).strip()


def _skill_block(title: str, skill: str | None) -> str:
    """The skill under its title, or nothing at all when there is none."""
    return f"{title}\n{skill.strip()}\n" if skill and skill.strip() else ""


class StandardPrompts:
    """Full instructions in every opening or window prompt; implements `data.environments.Prompts`."""

    @property
    def system(self) -> str | None:
        """No system message: not every chat template has one."""
        return None

    def opening(self, task: Task, first: Observation, skill: str | None) -> str:
        """Task, skill, how to play, the room, the first admissible actions."""
        return (
            f"{self._task(task, skill)}\n"
            f"{_SETTING} Receptacles that are closed show their content only after they have been opened; you can hold "
            'one thing at a time. A command that is not possible answers "Nothing happens."\n'
            f"{_REPLY_FORMAT}\n\n"
            f"{self._now(Observation(room_text(first), first.admissible_commands))}"
        )

    def follow_up(self, observation: Observation) -> str:
        """The observation and the admissible actions."""
        return self._now(observation)

    def window(
        self, task: Task, history: Sequence[Turn], turns_taken: int, observation: Observation, skill: str | None
    ) -> str:
        """Task, skill, the last turns, the current observation and admissible actions, the reply format."""
        lines = [self._task(task, skill), _SETTING, f"Turns taken so far: {turns_taken}."]
        if history:
            lines.append(f"The last {len(history)} of them, oldest first:")
            first_number = turns_taken - len(history) + 1
            for number, turn in enumerate(history, start=first_number):
                lines.append(f"[{number}] Observation: {_plain(turn.observation)}\n[{number}] Action: {_action(turn)}")
        current = observation if turns_taken else Observation(room_text(observation), observation.admissible_commands)
        return "\n".join(lines) + f"\n\n{self._now(current)}\n\n{_REPLY_FORMAT}"

    def skill_request(self, task: Task, turns: Sequence[Turn], final: Observation, won: bool) -> str:
        """The finished episode and the request for JSON with `summary` and `skill`."""
        steps = [
            f"[{number}] Observation: {_plain(turn.observation)}\n[{number}] Action: {_action(turn)}"
            for number, turn in enumerate(turns, start=1)
        ]
        outcome = "success" if won else "failure"
        return (
            f"Task: {task.text}\n"
            f"Below is one attempt at this household task. It ended in {outcome} after {len(turns)} turns.\n\n"
            + "\n".join([*steps, f"Last observation: {_plain(final.text)}"])
            + "\n\nWrite down what should be remembered from it. Answer with one JSON object and nothing else, with "
            'the two text fields "summary" and "skill". In "summary" say in one or two sentences what happened. '
            + (_WISH_AFTER_SUCCESS if won else _WISH_AFTER_FAILURE)
        )

    @staticmethod
    def _task(task: Task, skill: str | None) -> str:
        return f"Task: {task.text}\n" + _skill_block("Skill learned from an earlier attempt:", skill)

    @staticmethod
    def _now(observation: Observation) -> str:
        text = f"Observation: {observation.text.strip()}"
        if observation.admissible_commands:
            text += "\nAdmissible actions: " + "; ".join(observation.admissible_commands)
        return text


class CompactPrompts:
    """As few tokens as possible: no instructions, no admissible actions; implements `data.environments.Prompts`."""

    @property
    def system(self) -> str | None:
        """No system message."""
        return None

    def opening(self, task: Task, first: Observation, skill: str | None) -> str:
        """`task: ...`, `skill: ...` if there is one, and what can be seen in the room."""
        return f"{self._task(task, skill)}{_receptacles(room_text(first))}"

    def follow_up(self, observation: Observation) -> str:
        """The observation alone."""
        return observation.text.strip()

    def window(
        self, task: Task, history: Sequence[Turn], turns_taken: int, observation: Observation, skill: str | None
    ) -> str:
        """The opening's lines, the last turns as `> action` with what they were based on, the current observation."""
        lines = [f"{_compact(turn.observation)}\n> {_action(turn)}" for turn in history]
        return self._task(task, skill) + "\n".join([*lines, _compact(observation.text)])

    def skill_request(self, task: Task, turns: Sequence[Turn], final: Observation, won: bool) -> str:
        """`write a skill`, the task, the outcome, the actions."""
        actions = ", ".join(_action(turn) for turn in turns)
        return f"write a skill\ntask: {task.text}\noutcome: {'success' if won else 'failure'}\nactions: {actions}"

    @staticmethod
    def _task(task: Task, skill: str | None) -> str:
        block = f"skill: {skill.strip()}\n" if skill and skill.strip() else ""
        return f"task: {task.text}\n{block}"


def _action(turn: Turn) -> str:
    return turn.action if turn.action is not None else "(invalid reply)"


def _plain(observation: str) -> str:
    """An earlier observation on one line, without banner and task line."""
    return " ".join(room_text(Observation(observation)).split())


def _compact(observation: str) -> str:
    return _receptacles(_plain(observation))


def _receptacles(room: str) -> str:
    """`you see a cabinet 1, ...` of a room's description; any other text as it is.

    >>> _receptacles("You are in the middle of a room. Looking quickly around you, you see a bed 1, and a desk 1.")
    'you see a bed 1, and a desk 1.'
    """
    _, found, seen = room.partition("Looking quickly around you, ")
    return seen if found else room
