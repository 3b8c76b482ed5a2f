"""A world that needs no model to be understood: `reach` counts good actions, everything else happens on command."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from data.environments import Observation, ParsedReply, StepResult, Turn
from data.tasks import Panel, Task
from schemas.errors import EnvironmentTimeout
from stages.episodes import TurnRecord


class FakePrompts:
    """Short wording with every part that prompts may hold."""

    system = "Be brief."

    def opening(self, task: Task, first: Observation, skill: str | None) -> str:
        block = "" if skill is None else f"Skill: {skill}\n"
        return f"Task: {task.text}\n{block}{first.text}"

    def follow_up(self, observation: Observation) -> str:
        return observation.text

    def window(
        self, task: Task, history: Sequence[Turn], turns_taken: int, observation: Observation, skill: str | None
    ) -> str:
        past = "".join(f"{turn.observation} -> {turn.action}\n" for turn in history)
        return f"{self.opening(task, Observation(past or 'start'), skill)}{turns_taken}: {observation.text}"

    def skill_request(self, task: Task, turns: Sequence[Turn], final: Observation, won: bool) -> str:
        past = "".join(f"{turn.observation} -> {turn.reply}\n" for turn in turns)
        return f"{task.text}\n{past}{final.text}\nwon: {won}"


class FakeSession:
    """`payload` of the task: `reach` actions to win, `fail_at` the turn that raises, `fail` how."""

    def __init__(self, task: Task, log: list[str]) -> None:
        self.task, self.log = task, log
        self.count, self.turn, self.closed = 0, 0, False
        self.first_observation = Observation(f"start of {task.task_id}", ("go", "wait"))
        self.fingerprint = hashlib.sha256(task.sha256.encode()).hexdigest()

    def step(self, action: str) -> StepResult:
        self.count += 1
        return self._answer(f"you did {action}")

    def reject(self, reason: str) -> StepResult:
        self.log.append(f"{self.task.task_id} rejected {reason}")
        return self._answer(f"not understood: {reason}")

    def close(self) -> None:
        self.closed = True
        self.log.append(f"{self.task.task_id} closed")

    def _answer(self, text: str) -> StepResult:
        if self.turn == self.task.payload.get("fail_at"):
            raise {"error": RuntimeError("the world broke"), "timeout": EnvironmentTimeout("too slow")}[
                self.task.payload["fail"]
            ]
        self.turn += 1
        won = self.count >= self.task.payload.get("reach", 3)
        return StepResult(
            Observation(f"{text} ({self.turn})", ("go", "wait")), done=won, won=won, score=self.count / 10
        )


class FakeWorld:
    """Environment of fake sessions; a reply is valid when it holds a letter a to m, which is then the action."""

    name, version, prompts = "fake", "1", FakePrompts()

    def __init__(self) -> None:
        self.log: list[str] = []

    def start(self, task: Task) -> FakeSession:
        if task.payload.get("fail") == "start":
            raise RuntimeError("no such room")
        return FakeSession(task, self.log)

    def parse_reply(self, text: str, *, cut: bool) -> ParsedReply:
        found = re.search("[a-m]", text)
        return ParsedReply(found.group()) if found else ParsedReply(None, "no_letter")

    def panel(self, source: str, *, limit: int | None = None) -> Panel:
        raise NotImplementedError


def fake_task(name: str, **payload: object) -> Task:
    return Task(name, "kind", "train", f"the task {name}", payload)


def turn_record(number: int, observation: Observation, prompt: Sequence[int], stop_reason: str) -> TurnRecord:
    """A turn as if it had been played."""
    return TurnRecord(
        turn=number,
        observation=observation.text,
        admissible_commands=observation.admissible_commands,
        prompt_token_ids=tuple(prompt),
        token_ids=(20, 21),
        behaviour_logprobs=(-0.5, -0.25),
        temperature=1.0,
        text=f"reply {number}",
        action=f"act {number}",
        valid=True,
        invalid_reason=None,
        stop_reason=stop_reason,
        seed=number,
    )
