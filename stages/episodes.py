"""The episode loop: many live episodes in lock-step, token ids in and out, one record per episode whatever happens.

All live episodes ask the engine for their next reply together; each turn's draw comes from the episode's own seed, so who
else is alive does not matter. An exception of the environment ends its episode with a reason and touches no other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data.environments import Environment, Observation, ParsedReply, PreparesSteps, Session, StepResult
from data.seeds import derive_seed
from schemas.errors import ConfigError, EngineError, EnvironmentFault, EnvironmentTimeout, RsipoError
from stages.engines import Engine, GenerationRequest, GenerationResult
from stages.episode_records import EpisodeJob, EpisodeRecord, TurnRecord, episodes_from_tables
from stages.rendering import Renderer, next_prompt_ids

if TYPE_CHECKING:
    from data.progress import Reporter

__all__ = ["EpisodeJob", "EpisodeRecord", "Limits", "TurnRecord", "episodes_from_tables", "play"]

MAX_NON_FINITE_SHARE = 0.01  # of replies with a log-probability that is not finite, above which the engine is at fault


@dataclass(frozen=True)
class Limits:
    """Where episodes end: turns; tokens of a `window` prompt, of a reply, of an `append_only` sequence."""

    max_turns: int
    max_prompt_tokens: int
    max_reply_tokens: int
    max_episode_tokens: int


def play(
    engine: Engine,
    environment: Environment,
    renderer: Renderer,
    jobs: Sequence[EpisodeJob],
    *,
    limits: Limits,
    temperature: float,
    reporter: Reporter | None = None,
    batch_episodes: int | None = None,
) -> list[EpisodeRecord]:
    """Play every job to its end; records in the order of `jobs`.

    At most `batch_episodes` are alive at once (default: all); it changes no sampled token and no outcome. `reporter`
    advances by the episodes that end, with fields `won` and `tokens`. Raises EngineError when the engine fails or more than
    1 % of all replies hold a log-probability that is not finite; below that share such an episode does not count. Raises
    ConfigError when the environment does.
    """
    waiting = list(enumerate(jobs))[::-1]
    most = len(jobs) if batch_episodes is None else batch_episodes
    records: dict[int, EpisodeRecord] = {}
    live: dict[int, _Live] = {}
    replies = broken = 0
    try:
        while waiting or live:
            while waiting and len(live) < most:
                index, job = waiting.pop()
                live[index] = _Live(
                    job, environment, renderer, limits, engine_context(engine), f"{index}:{job.episode_id}"
                )
            asking = [episode for episode in live.values() if episode.stop_reason is None]
            results = engine.generate([episode.request(temperature) for episode in asking]) if asking else []
            for episode, result in zip(asking, results, strict=True):
                episode.read(result, temperature)
            _carry_out(environment, asking)
            replies, broken = replies + len(asking), broken + sum(episode.broken for episode in asking)
            ended = [index for index, episode in live.items() if episode.stop_reason is not None]
            for index in ended:
                records[index] = live.pop(index).close()
            _report(reporter, [records[index] for index in ended])
        # Only now: among the first few replies one is more than the share, and a broken engine ends episodes at once.
        if broken > MAX_NON_FINITE_SHARE * replies:
            raise _non_finite(broken, replies)
    finally:
        for episode in live.values():
            episode.close()
        engine.end_sessions()
    return [records[index] for index in range(len(jobs))]


class _Live:
    """An episode that is being played: the session, what was said so far, and the ids of the next prompt."""

    def __init__(
        self,
        job: EpisodeJob,
        environment: Environment,
        renderer: Renderer,
        limits: Limits,
        context_length: int | None,
        session_name: str,
    ) -> None:
        self.job, self.environment, self.renderer, self.limits = job, environment, renderer, limits
        self.context_length = context_length if context_length is not None else math.inf
        self.session_name = session_name if renderer.mode == "append_only" else None
        self.session: Session | None = None
        self.fingerprint: str | None = None
        self.observation: Observation | None = None
        self.won: bool | None = False
        self.score: float | None = None
        self.metrics: Mapping[str, float] = {}
        self.turns: list[TurnRecord] = []
        self.sequence: list[int] = []  # append_only: every id so far, prompts and replies
        self.parsed: ParsedReply | None = None  # the last reply, as read
        self.prompt: list[int] = []  # the ids that this turn adds (append_only) or its whole prompt (window)
        self.stop_reason: str | None = None
        self.error: str | None = None
        self.broken = False
        try:
            self.session = environment.start(job.task)
            self.observation = self.session.first_observation
            self.fingerprint = self.session.fingerprint
        except Exception as error:  # whatever a world raises is data of its episode
            self.fail(error)
        else:
            self._prepare()

    def request(self, temperature: float) -> GenerationRequest:
        """The request for the next reply."""
        prompt = [*self.sequence, *self.prompt]
        return GenerationRequest(
            prompt, self.limits.max_reply_tokens, self._turn_seed(), temperature, self.session_name
        )

    def read(self, result: GenerationResult, temperature: float) -> None:
        """Record the reply as the environment reads it; `parsed` is then to be carried out, if the episode goes on."""
        if not all(math.isfinite(logprob) for logprob in result.logprobs):
            self.broken = True
            self._end("env_error", won=None, error="the engine returned a log-probability that is not finite")
            return
        cut = result.stop_reason == "length"
        text = self.renderer.decode(result.token_ids if cut else result.token_ids[:-1])
        failure: Exception | None = None
        try:
            parsed = self.environment.parse_reply(text, cut=cut)
        except Exception as error:
            parsed, failure = ParsedReply(None, "env_error"), error
        if cut:
            parsed = ParsedReply(None, "cut")
        self._record(result, temperature, text, parsed)
        self.parsed = parsed
        if failure is not None:
            self.fail(failure)

    def close(self) -> EpisodeRecord:
        """Close the session; the episode's record."""
        if self.session is not None:
            try:
                self.session.close()
            except Exception as error:
                self.error = self.error or f"closing: {_described(error)}"
            self.session = None
        return EpisodeRecord(
            job=self.job,
            fingerprint=self.fingerprint,
            won=self.won,
            score=self.score,
            metrics=self.metrics,
            invalid_turns=sum(not turn.valid for turn in self.turns),
            stop_reason=self.stop_reason or "env_error",
            error=self.error,
            turns=tuple(self.turns),
            final_observation=None if self.observation is None else Observation(self.observation.text),
        )

    def _record(self, result: GenerationResult, temperature: float, text: str, parsed: ParsedReply) -> None:
        assert self.observation is not None
        self.turns.append(
            TurnRecord(
                turn=len(self.turns),
                observation=self.observation.text,
                admissible_commands=tuple(self.observation.admissible_commands),
                prompt_token_ids=tuple(self.prompt),
                token_ids=tuple(result.token_ids),
                behaviour_logprobs=tuple(float(np.float32(logprob)) for logprob in result.logprobs),
                temperature=float(np.float32(temperature)),
                text=text,
                action=parsed.action,
                valid=parsed.valid,
                invalid_reason=parsed.invalid_reason,
                stop_reason=result.stop_reason,
                seed=self._turn_seed(),
            )
        )
        if self.session_name is not None:
            self.sequence += [*self.prompt, *result.token_ids]

    def carry_out(self) -> None:
        """Step the session with what was read, and prepare the next prompt or the end."""
        assert self.session is not None and self.parsed is not None
        parsed = self.parsed
        try:
            if parsed.action is None:
                answer: StepResult = self.session.reject(parsed.invalid_reason or "invalid")
            else:
                answer = self.session.step(parsed.action)
            _check_metrics(answer.metrics)
        except Exception as error:
            self.fail(error)
            return
        self.observation, self.won, self.score = answer.observation, answer.won, answer.score
        self.metrics = answer.metrics
        if answer.done:
            self._end("done", won=answer.won)
        elif len(self.turns) >= self.limits.max_turns:
            self._end("max_turns", won=answer.won)
        else:
            self._prepare()

    def _prepare(self) -> None:
        """The next prompt; ends the episode with `context` when it or a full reply after it does not fit."""
        assert self.observation is not None
        self.prompt = next_prompt_ids(self.renderer, self.job.task, self.turns, self.observation, self.job.skill)
        prompt_length = len(self.sequence) + len(self.prompt)
        longest = prompt_length + self.limits.max_reply_tokens
        if self.renderer.mode == "window":
            fits = prompt_length <= self.limits.max_prompt_tokens
        else:
            fits = longest <= self.limits.max_episode_tokens
        if not fits or longest > self.context_length:
            self._end("context", won=self.won)

    def fail(self, error: Exception) -> None:
        """End the episode with what the world raised; it does not count.

        A ConfigError is raised again: what the user has set wrongly is wrong for every episode.
        """
        if isinstance(error, ConfigError):
            raise error
        timeout = isinstance(error, TimeoutError | EnvironmentTimeout)
        self._end("timeout" if timeout else "env_error", won=None, error=_described(error))

    def _end(self, reason: str, *, won: bool | None, error: str | None = None) -> None:
        self.stop_reason, self.won, self.error = reason, won, error

    def _turn_seed(self) -> int:
        """Of the turn being sampled. While it is recorded `turns` does not hold it yet."""
        return derive_seed(self.job.seed, "turn", len(self.turns))


def _carry_out(environment: Environment, episodes: Sequence[_Live]) -> None:
    """Step every episode that goes on, after the environment has seen all the steps to come where it wants to."""
    going = [episode for episode in episodes if episode.stop_reason is None]
    if isinstance(environment, PreparesSteps):
        steps = [
            (episode.session, episode.parsed.action)
            for episode in going
            if episode.session is not None and episode.parsed is not None and episode.parsed.action is not None
        ]
        try:
            environment.prepare(steps)
        except Exception as error:  # a fault of the world, of every episode in it
            for episode in going:
                episode.fail(error)
            return
    for episode in going:
        episode.carry_out()


def _check_metrics(metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise EnvironmentFault("a metric is not a finite number", where=name, found=value)


def engine_context(engine: Engine) -> int | None:
    """Longest sequence the engine's model can hold, where the engine says so."""
    return getattr(engine, "context_length", None)


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, RsipoError) else f"{type(error).__name__}: {error}"


def _non_finite(broken: int, replies: int) -> EngineError:
    return EngineError(
        "the engine returns log-probabilities that are not finite",
        expected=f"at most {MAX_NON_FINITE_SHARE:.0%} of the replies",
        found=f"{broken} of {replies}",
        remedy="check the checkpoint, or use engine.name=transformers with model.dtype=float32",
    )


def _report(reporter: Reporter | None, ended: Sequence[EpisodeRecord]) -> None:
    if reporter is not None and ended:
        won = sum(record.won is True for record in ended)
        reporter.advance(len(ended), won=won, tokens=sum(record.sampled_tokens for record in ended))
