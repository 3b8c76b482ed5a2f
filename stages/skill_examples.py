"""Annotations as training examples: token ids, the data audit, and the split into training and held-out tasks. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data.annotations import Annotation, Rejection, TrajectoryRequest
from schemas.config import SftSection
from schemas.errors import ConfigError, RsipoError
from stages.skill_writing import parse_skill

if TYPE_CHECKING:
    from stages.packing import TrainRow
    from stages.rendering import Renderer

SHOWN_REJECTIONS = 50


@dataclass(frozen=True)
class Example:
    """One annotation as token ids: the prompt, and the answer with its end-of-turn id.

    `group` is the task, or a hash of the content where no task is known: what must not be split between training and
    held-out examples.
    """

    line: int
    group: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    skill: str
    won: bool | None

    @property
    def tokens(self) -> int:
        """Length of prompt and answer."""
        return len(self.prompt_ids) + len(self.answer_ids)


def examples_of(
    annotations: Sequence[Annotation], renderer: Renderer, *, min_words: int, max_length: int
) -> tuple[list[Example], list[Rejection]]:
    """Usable examples and the rejections of the others, each in the order of `annotations`.

    Rejected are answers that would not be accepted from the policy either, and examples longer than `max_length` tokens.
    """
    examples: list[Example] = []
    rejected: list[Rejection] = []
    for annotation in annotations:
        parsed = parse_skill(annotation.response, cut=False, min_words=min_words)
        if parsed.skill is None:
            rejected.append(Rejection(annotation.line, f"the answer holds no usable skill ({parsed.reason})"))
            continue
        try:
            example = _example(annotation, parsed.skill, renderer)
        except RsipoError as error:
            rejected.append(Rejection(annotation.line, str(error)))
            continue
        if example.tokens > max_length:
            rejected.append(Rejection(annotation.line, f"{example.tokens} tokens are more than {max_length}"))
        else:
            examples.append(example)
    return examples, rejected


def _example(annotation: Annotation, skill: str, renderer: Renderer) -> Example:
    request = annotation.request
    if isinstance(request, TrajectoryRequest):
        prompt = renderer.skill_request_ids(request.task, request.turns, request.final, request.won)
    else:
        prompt = renderer.chat_ids(request.texts, request.system)
    answer = renderer.answer_ids(annotation.response)
    content = hashlib.sha256(repr((prompt, answer)).encode()).hexdigest()
    return Example(annotation.line, annotation.group or content, tuple(prompt), tuple(answer), skill, annotation.won)


@dataclass(frozen=True)
class Audit:
    """What a set of examples is like, in the numbers that have given away bad sets before."""

    examples: int
    unique_skills: int
    duplicate_share: float  # examples whose prompt and answer occurred before
    success_share: float | None  # of those that say how their episode ended
    token_quantiles: dict[str, int]  # of whole examples

    def as_summary(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "unique_skills": self.unique_skills,
            "duplicate_share": self.duplicate_share,
            "success_share": self.success_share,
            "tokens": self.token_quantiles,
        }


def audit_examples(examples: Sequence[Example]) -> Audit:
    """The audit of a set, which may be empty."""
    distinct = {(example.prompt_ids, example.answer_ids) for example in examples}
    known = [example.won for example in examples if example.won is not None]
    lengths = sorted(example.tokens for example in examples)
    places = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}
    quantiles = {name: int(np.quantile(lengths, q, method="lower")) for name, q in places.items()} if lengths else {}
    return Audit(
        examples=len(examples),
        unique_skills=len({" ".join(example.skill.split()).lower() for example in examples}),
        duplicate_share=1.0 - len(distinct) / len(examples) if examples else 0.0,
        success_share=sum(known) / len(known) if known else None,
        token_quantiles=quantiles,
    )


def check_audit(audit: Audit, settings: SftSection) -> None:
    """Raise ConfigError for a set that fails a threshold: too few distinct skills, or too many duplicates."""
    if audit.unique_skills < settings.min_unique_skills:
        raise ConfigError(
            "the annotations hold too few different skills",
            where="sft.min_unique_skills",
            expected=f"at least {settings.min_unique_skills}",
            found=f"{audit.unique_skills} in {audit.examples} usable examples",
            remedy="see the rejected lines and their reasons in logs/sft-rejected.jsonl",
        )
    if audit.duplicate_share > settings.max_duplicate_share:
        raise ConfigError(
            "too many annotations occur more than once",
            where="sft.max_duplicate_share",
            expected=f"at most {settings.max_duplicate_share:.0%}",
            found=f"{audit.duplicate_share:.0%}",
            remedy="remove the duplicates, or raise the limit",
        )


def split_examples(examples: Sequence[Example], held_out: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples, each in the order of `examples`.

    Whole groups are held out, in the order of a hash of (seed, group), until a share of at least `held_out` is reached; the
    file's order plays no part. Raises ConfigError when that would leave no training example.
    """

    def place(group: str) -> str:
        return hashlib.sha256(f"{seed}\x1f{group}".encode()).hexdigest()

    wanted = math.ceil(held_out * len(examples))
    chosen: set[str] = set()
    count = 0
    for group in sorted({example.group for example in examples}, key=place):
        if count >= wanted:
            break
        chosen.add(group)
        count += sum(example.group == group for example in examples)
    training = [example for example in examples if example.group not in chosen]
    if not training:
        raise ConfigError(
            "no example is left to train on after holding some out",
            where="sft.held_out",
            expected="examples of at least two tasks",
            found=f"{len(examples)} examples of {len(chosen)} task(s)",
            remedy="give more annotations",
        )
    return training, [example for example in examples if example.group in chosen]


def train_row(example: Example) -> TrainRow:
    """The row of one example: loss on the answer's tokens alone."""
    from stages.packing import TrainRow

    prompt, answer = len(example.prompt_ids), len(example.answer_ids)
    return TrainRow(
        kind="example",
        row_id=f"line {example.line}",
        token_ids=np.asarray((*example.prompt_ids, *example.answer_ids), np.int32),
        sampled=np.arange(prompt + answer) >= prompt,
        behaviour_logprobs=np.zeros(answer, np.float32),
    )


def data_report(examples: Sequence[Example], rejected: Sequence[Rejection], audit: Audit) -> dict[str, Any]:
    """Counts, audit and the first rejected lines, for the summary."""
    shown = [{"line": rejection.line, "reason": rejection.reason} for rejection in rejected[:SHOWN_REJECTIONS]]
    return {"accepted": len(examples), "rejected": len(rejected), **audit.as_summary(), "rejected_lines": shown}
