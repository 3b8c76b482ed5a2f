"""Generation with vLLM: the engine for GPUs and models beyond a few hundred million parameters.

State of checking: the request mapping, the reading of results and the refusals are tested against a stand-in module. The
class as a whole has NOT been run against an installed vLLM; the calls follow what was measured by hand on vLLM's CPU build
0.32 (weight reload, log-probabilities against transformers), and nothing was run on a GPU. Each change of weights is
followed by a probe against the files (`stages.probe`), which refuses an engine that answers otherwise.

What differs from the transformers engine:
- Seeds. On a GPU each request carries its own seed. The CPU build cannot (its generator has no offset): there the engine
  has one seed, and a resumed run samples other replies than an undisturbed one would have.
- Batches. vLLM's logits depend on the batch in their last bits and near-tied decisions are not taken again: a few tokens
  in many thousands may differ with the batch (vLLM's own VLLM_BATCH_INVARIANT=1 helps on some GPUs).
- Sessions are not needed: the prefix cache is keyed by tokens. It survives a weight update, so it is reset after each.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError, EngineError
from stages.engines import GenerationRequest, GenerationResult
from stages.rendering import check_vocabulary, end_of_turn_ids, generation_eos_ids

TRUNCATED = ("top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
PROBE_IDS = tuple(range(1, 17))
SCORE_BATCH = 64  # sequences scored in one call: prompt log-probabilities are held for all of them
CPU_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class VllmEngine:
    """See `stages.engines.Engine`.

    Options: `device` "cuda" or "cpu" (default: CUDA where there is any), `max_model_len`, `gpu_memory_utilization`, `seed`
    (of the CPU build). Raises EngineError when vLLM is missing or fails to start; ConfigError for options that would change
    the sampled distribution (top-p, top-k, penalties: the recorded log-probabilities would be those of another policy) and
    for a dtype other than float32 on a CPU (bfloat16 is an order of magnitude slower there).
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        dtype: str = "float32",
        threads: int = 0,
        batch_sequences: int = 128,
        device: str | None = None,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.6,
        seed: int = 0,
        **options: object,
    ) -> None:
        refuse_options(options)
        self.device = device or _present_device()
        self.dtype = dtype
        if self.device == "cpu":
            _prepare_cpu(dtype, threads)
        self._vllm = _import_vllm()
        if self.device == "cpu":
            keep_cpu_linears_unpacked()
        tokenizer = _load_tokenizer(model_dir)
        config = _read_json(Path(model_dir) / "config.json")
        check_vocabulary(tokenizer, int(config["vocab_size"]))
        self.eos_ids = frozenset(end_of_turn_ids(tokenizer)) | frozenset(generation_eos_ids(Path(model_dir)))
        self.context_length: int | None = max_model_len or config.get("max_position_embeddings")
        self.weights_sha256: str | None = None
        arguments: dict[str, Any] = {
            "model": str(model_dir),
            "dtype": dtype,
            "max_model_len": self.context_length,
            "max_num_seqs": batch_sequences,
            "enable_prefix_caching": True,
            "enforce_eager": self.device == "cpu",
            "generation_config": "vllm",  # no sampling defaults from the model's own file
            "logprobs_mode": "processed_logprobs",  # at the sampling temperature
            "max_logprobs": -1,  # `score` at other temperatures needs the whole distribution
            "trust_remote_code": False,
            "seed": seed,
        }
        if self.device != "cpu":
            arguments["gpu_memory_utilization"] = gpu_memory_utilization
        try:
            self._llm = self._vllm.LLM(**arguments)
        except Exception as error:  # vLLM raises whatever its workers raised
            raise EngineError("vLLM does not start", where=str(model_dir), found=_first_line(error)) from error

    def load_weights(self, model_dir: Path, weights_sha256: str) -> None:
        """See `Engine.load_weights`. Raises EngineError when vLLM reports success and still answers as before."""
        before = self.score([PROBE_IDS], 1.0)
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model_dir)})
        except Exception as error:
            raise EngineError("vLLM cannot reload weights", where=str(model_dir), found=_first_line(error)) from error
        self._llm.reset_prefix_cache()
        after = self.score([PROBE_IDS], 1.0)
        changed = self.weights_sha256 is not None and self.weights_sha256 != weights_sha256
        # In float32 even one small update moves some last bit; lower precision may truly round to the same weights.
        if changed and self.dtype == "float32" and before == after:
            raise EngineError(
                "vLLM took new weights and serves the old ones",
                where=str(model_dir),
                remedy="restart the engine, or use engine.name=transformers",
            )
        self.weights_sha256 = weights_sha256

    def generate(
        self, requests: Sequence[GenerationRequest], on_tokens: Callable[[int], None] | None = None
    ) -> list[GenerationResult]:
        """See `Engine.generate`; `on_tokens` hears once, at the end. Raises EngineError when vLLM fails."""
        if not requests:
            return []
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        parameters = [
            self._vllm.SamplingParams(**sampling_arguments(request, self.eos_ids, seeded=self.device != "cpu"))
            for request in requests
        ]
        outputs = self._run(prompts, parameters)
        results = [read_completion(output.outputs[0], self.eos_ids) for output in outputs]
        if on_tokens is not None:
            on_tokens(sum(len(result.token_ids) for result in results))
        return results

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """See `Engine.score`. Without the prefix cache, on which vLLM's prompt log-probabilities have depended; at
        temperatures other than 1 the whole distribution is fetched, which is slow: meant for probes."""
        temperature = temperature or 1.0
        scores: list[list[float]] = [[] for _ in sequences]
        wanted = [index for index, sequence in enumerate(sequences) if len(sequence) > 1]
        arguments = {
            "temperature": 0.0,
            "max_tokens": 1,
            "detokenize": False,
            "prompt_logprobs": 0 if temperature == 1.0 else -1,
        }
        for start in range(0, len(wanted), SCORE_BATCH):
            batch = wanted[start : start + SCORE_BATCH]
            self._llm.reset_prefix_cache()
            prompts = [{"prompt_token_ids": list(sequences[index])} for index in batch]
            outputs = self._run(prompts, [self._vllm.SamplingParams(**arguments) for _ in batch])
            for index, output in zip(batch, outputs, strict=True):
                scores[index] = read_prompt_logprobs(output.prompt_logprobs, sequences[index], temperature)
        self._llm.reset_prefix_cache()
        return scores

    def end_sessions(self) -> None:
        """Nothing is kept by session."""

    def close(self) -> None:
        """Let go of the engine; its memory is freed with the last reference."""
        self._llm = None

    def _run(self, prompts: list[dict[str, Any]], parameters: list[Any]) -> list[Any]:
        try:
            return self._llm.generate(prompts, parameters, use_tqdm=False)
        except Exception as error:
            raise EngineError("vLLM failed while generating", found=_first_line(error)) from error


def sampling_arguments(request: GenerationRequest, eos_ids: frozenset[int], *, seeded: bool) -> dict[str, Any]:
    """The keyword arguments of `vllm.SamplingParams` for one request: the whole distribution, the sampled token's
    log-probability, ids only.

    >>> arguments = sampling_arguments(GenerationRequest([1], 5, 7, 0.4), frozenset({2}), seeded=True)
    >>> arguments["temperature"], arguments["seed"], arguments["stop_token_ids"], arguments["logprobs"]
    (0.4, 7, [2], 0)
    """
    arguments: dict[str, Any] = {
        "n": 1,
        "temperature": request.temperature,
        "max_tokens": request.max_new_tokens,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "logprobs": 0,
        "stop_token_ids": sorted(eos_ids),
        "detokenize": False,
    }
    if seeded:
        arguments["seed"] = request.seed
    return arguments


def read_completion(completion: Any, eos_ids: frozenset[int]) -> GenerationResult:
    """vLLM's completion as ours. Raises EngineError when ids and log-probabilities do not match one to one, or when the
    reply stopped for another reason than an end of turn or the limit."""
    ids = list(completion.token_ids)
    entries = completion.logprobs or []
    if len(entries) != len(ids) or any(token not in entry for token, entry in zip(ids, entries, strict=False)):
        raise EngineError(
            "vLLM's log-probabilities do not belong to its tokens",
            expected=f"{len(ids)} tokens with a log-probability each",
            found=f"{len(entries)} log-probabilities",
        )
    ended = bool(ids) and ids[-1] in eos_ids
    if not ended and completion.finish_reason != "length":
        raise EngineError("vLLM ended a reply for an unknown reason", found=repr(completion.finish_reason))
    logprobs = [float(entry[token].logprob) for token, entry in zip(ids, entries, strict=True)]
    return GenerationResult(ids, logprobs, "eos" if ended else "length")


def read_prompt_logprobs(
    entries: Sequence[Mapping[int, Any] | None], sequence: Sequence[int], temperature: float
) -> list[float]:
    """log pi(token t | tokens < t) for t >= 1 from vLLM's prompt log-probabilities (temperature 1; entry 0 is None).

    At another temperature every entry must hold the whole vocabulary: log p^(1/T) is normalised again.
    """
    if len(entries) != len(sequence):
        raise EngineError("vLLM scored another number of tokens", expected=len(sequence), found=len(entries))
    scores = []
    for token, entry in zip(sequence[1:], entries[1:], strict=True):
        if entry is None or token not in entry:
            raise EngineError("vLLM gave no log-probability for a prompt token", found=f"token {token}")
        score = float(entry[token].logprob)
        if temperature != 1.0:
            scaled = [float(value.logprob) / temperature for value in entry.values()]
            largest = max(scaled)
            score = score / temperature - largest - math.log(math.fsum(math.exp(value - largest) for value in scaled))
        scores.append(score)
    return scores


def refuse_options(options: Mapping[str, object]) -> None:
    """Raise ConfigError for any option this engine does not know, with the reason for those that truncate sampling."""
    for name in sorted(options):
        truncated = name in TRUNCATED
        raise ConfigError(
            "the engine samples from the whole distribution" if truncated else "unknown engine option",
            where=f"engine.options.{name}",
            expected="device, max_model_len, gpu_memory_utilization or seed",
            found=repr(options[name]),
            remedy="remove it: log-probabilities of truncated sampling are those of another policy"
            if truncated
            else None,
        )


def keep_cpu_linears_unpacked() -> None:
    """Make vLLM's CPU build use plain linears. Call it before `LLM` is constructed.

    The build packs linear weights when it loads them, and `reload_weights` then reports success without reaching the packed
    copies. Raises EngineError when vLLM no longer has the function: its reload must then be checked anew.
    """
    import torch

    try:
        from vllm.model_executor.layers import utils
    except ImportError:
        utils = None
    if utils is None or not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise EngineError(
            "this vLLM's CPU build is not known to reload weights rightly",
            expected="vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm",
            remedy="use engine.name=transformers on a CPU",
        )

    def use_plain_linear(layer: Any, *args: object, **kwargs: object) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = use_plain_linear


def _prepare_cpu(dtype: str, threads: int) -> None:
    if dtype != "float32":
        raise ConfigError("vLLM on a CPU needs float32", where="model.dtype", expected="float32", found=dtype)
    for name, value in CPU_SETTINGS.items():
        os.environ.setdefault(name, value)
    if threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def _present_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _import_vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise EngineError(
            "vLLM is not installed",
            where="engine.name=vllm",
            found=_first_line(error),
            remedy="pip install 'rsipo[vllm]', or use engine.name=transformers",
        ) from error
    return vllm


def _load_tokenizer(model_dir: Path | str) -> Any:
    from stages.engines.model_loading import load_tokenizer

    return load_tokenizer(model_dir)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise EngineError("cannot read the model's configuration", where=str(path), found=_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
