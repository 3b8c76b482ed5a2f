"""The generation engine protocol, and how a name becomes an engine. Token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from schemas.errors import ConfigError

BUILTIN = {
    "transformers": "stages.engines.transformers_engine:TransformersEngine",
    "vllm": "stages.engines.vllm_engine:VllmEngine",
}


@dataclass(frozen=True)
class GenerationRequest:
    """One reply to sample after `prompt_ids`.

    `seed` alone decides the draw of every token (one uniform per position); `temperature` 0 is greedy. `session` names a
    growing sequence: a request whose prompt extends the session's earlier prompt + reply may reuse its key-value cache.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    seed: int
    temperature: float
    session: str | None = None


@dataclass(frozen=True)
class GenerationResult:
    """The sampled ids (the end-of-turn id included when it was sampled), and log pi(id | prefix) at the sampling temperature.

    At temperature 0 the log-probabilities are those of temperature 1. `stop_reason`: `eos` or `length`.
    """

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: Literal["eos", "length"]


class Engine(Protocol):
    """A model that samples. `weights_sha256` is the hash of the checkpoint it serves, as its manifest names it."""

    weights_sha256: str | None

    def load_weights(self, model_dir: Path, weights_sha256: str) -> None:
        """Serve the weights of `model_dir` (HF layout, safetensors); every cache of the earlier weights is dropped."""

    def generate(
        self, requests: Sequence[GenerationRequest], on_tokens: Callable[[int], None] | None = None
    ) -> list[GenerationResult]:
        """Sample one reply per request, in request order. Batch composition must not change what is sampled."""

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """log pi(token t | tokens < t) for t >= 1 of each sequence (length len - 1); for probes and parity checks."""

    def end_sessions(self) -> None:
        """Forget every session's cache."""

    def close(self) -> None: ...


def build_engine(
    name: str, model_dir: Path, *, dtype: str, threads: int, batch_sequences: int, options: Mapping[str, Any]
) -> Engine:
    """Construct a built-in engine or `module:Class`. Raises ConfigError when it cannot be imported."""
    module_name, colon, attribute = BUILTIN.get(name, name).partition(":")
    try:
        if not colon:
            raise ImportError("not an import string module:Class")
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "cannot import the generation engine",
            where="engine.name",
            expected=f"one of {', '.join(BUILTIN)} or module:Class",
            found=f"{name} ({error})",
            remedy="install its package, or pick engine.name=transformers",
        ) from error
    given = {"dtype": dtype, "threads": threads, "batch_sequences": batch_sequences}
    try:
        return factory(model_dir, **given, **options)
    except TypeError as error:
        if not options:
            raise
        # Engines hand options on, so only the call can tell whether one is unknown or given twice.
        raise ConfigError(
            "the generation engine refuses its options",
            where="engine.options",
            expected=f"options of {name}",
            found=str(error),
        ) from error
