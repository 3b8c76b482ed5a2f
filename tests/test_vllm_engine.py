"""The parts of the vLLM engine that need no vLLM: mapping of requests, reading of results, refusals."""

from __future__ import annotations

import math
import sys
import types

import pytest

from schemas.errors import ConfigError, EngineError
from stages.engines import GenerationRequest
from stages.engines.vllm_engine import VllmEngine, read_completion, read_prompt_logprobs, sampling_arguments

EOS = frozenset({2})


def logprob(value: float) -> types.SimpleNamespace:
    return types.SimpleNamespace(logprob=value)


def completion(ids, finish_reason, entries=None):
    entries = [{token: logprob(-0.5)} for token in ids] if entries is None else entries
    return types.SimpleNamespace(token_ids=tuple(ids), logprobs=entries, finish_reason=finish_reason)


class FakeLLM:
    """Records what it is asked; replies with the prompt's last id and an end of turn; `version` moves its scores."""

    def __init__(self, **arguments) -> None:
        self.arguments, self.calls, self.version, self.reloads = arguments, [], 0, True

    def generate(self, prompts, parameters, use_tqdm):
        self.calls.append((prompts, parameters))
        return [
            types.SimpleNamespace(
                outputs=[completion([prompt["prompt_token_ids"][-1], 2], "stop")],
                prompt_logprobs=[None, *({t: logprob(-1.0 - self.version)} for t in prompt["prompt_token_ids"][1:])],
            )
            for prompt in prompts
        ]

    def collective_rpc(self, name, kwargs):
        self.calls.append((name, kwargs))
        self.version += self.reloads

    def reset_prefix_cache(self):
        self.calls.append("reset")


@pytest.fixture
def vllm(monkeypatch) -> types.ModuleType:
    """A stand-in for the installed package, with the function that the CPU build packs linears in."""
    fake = types.ModuleType("vllm")
    fake.LLM, fake.SamplingParams = FakeLLM, lambda **arguments: arguments
    names = ["vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.utils"]
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[1]].utils = modules[names[2]]
    modules[names[2]].dispatch_cpu_unquantized_gemm = lambda layer: None
    for name, module in {"vllm": fake, **modules}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "1")
    return fake


def test_requests_are_sampled_from_the_whole_distribution():
    arguments = sampling_arguments(GenerationRequest([1], 9, 77, 0.4), frozenset({5, 2}), seeded=True)
    assert (arguments["top_p"], arguments["top_k"], arguments["min_p"]) == (1.0, 0, 0.0)
    assert (arguments["temperature"], arguments["max_tokens"], arguments["seed"]) == (0.4, 9, 77)
    assert arguments["stop_token_ids"] == [2, 5] and arguments["logprobs"] == 0
    assert "seed" not in sampling_arguments(GenerationRequest([1], 9, 77, 0.4), EOS, seeded=False)


def test_results_keep_the_end_of_turn_and_its_logprob():
    result = read_completion(
        completion([7, 2], "stop", [{7: logprob(-1.5), 9: logprob(-0.1)}, {2: logprob(-0.25)}]), EOS
    )
    assert (result.token_ids, result.logprobs, result.stop_reason) == ([7, 2], [-1.5, -0.25], "eos")
    assert read_completion(completion([7, 8], "length"), EOS).stop_reason == "length"
    assert read_completion(completion([7, 2], "length"), EOS).stop_reason == "eos"


@pytest.mark.parametrize(
    "broken",
    [
        completion([7, 2], "stop", [{7: logprob(-1.0)}]),
        completion([7, 2], "stop", [{7: logprob(-1.0)}, {3: logprob(-1.0)}]),
        completion([7, 2], "stop", []),
        completion([7], "abort"),
        completion([], "stop"),
    ],
)
def test_results_that_do_not_fit_are_refused(broken):
    with pytest.raises(EngineError):
        read_completion(broken, EOS)


def test_prompt_logprobs_are_brought_to_the_temperature():
    probabilities = {0: 0.5, 1: 0.3, 2: 0.2}
    entry = {token: logprob(math.log(p)) for token, p in probabilities.items()}
    assert read_prompt_logprobs([None, entry], [9, 1], 1.0) == [math.log(0.3)]
    squares = {token: p**2 for token, p in probabilities.items()}
    [score] = read_prompt_logprobs([None, entry], [9, 1], 0.5)
    assert score == pytest.approx(math.log(squares[1] / sum(squares.values())))
    with pytest.raises(EngineError):
        read_prompt_logprobs([None, entry], [9, 7], 1.0)
    with pytest.raises(EngineError):
        read_prompt_logprobs([None], [9, 7], 1.0)


def test_the_engine_speaks_to_vllm_and_checks_its_weights(vllm, tiny_model_dir):
    engine = VllmEngine(tiny_model_dir, device="cpu", batch_sequences=4)
    llm = engine._llm
    assert llm.arguments["logprobs_mode"] == "processed_logprobs" and llm.arguments["dtype"] == "float32"
    layer = types.SimpleNamespace()
    sys.modules["vllm.model_executor.layers.utils"].dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert callable(layer.cpu_linear)
    heard: list[int] = []
    results = engine.generate([GenerationRequest([4, 5], 3, 1, 1.0), GenerationRequest([6], 3, 2, 0.0)], heard.append)
    assert [r.token_ids for r in results] == [[5, 2], [6, 2]] and heard == [4]
    assert llm.calls[0][0] == [{"prompt_token_ids": [4, 5]}, {"prompt_token_ids": [6]}]
    assert engine.score([[1, 2, 3], [4]], 1.0) == [[-1.0, -1.0], []]

    engine.load_weights(tiny_model_dir, "a" * 64)
    llm.calls.clear()
    engine.load_weights(tiny_model_dir, "b" * 64)
    reload = llm.calls.index(("reload_weights", {"weights_path": str(tiny_model_dir)}))
    assert llm.calls[reload + 1] == "reset" and engine.weights_sha256 == "b" * 64
    llm.reloads = False
    with pytest.raises(EngineError, match="serves the old"):
        engine.load_weights(tiny_model_dir, "c" * 64)
    assert engine.weights_sha256 == "b" * 64


def test_seeds_travel_with_requests_on_a_gpu_only(vllm, tiny_model_dir):
    for device, seeded in (("cuda", True), ("cpu", False)):
        engine = VllmEngine(tiny_model_dir, device=device)
        engine.generate([GenerationRequest([4], 3, 11, 1.0)])
        [(_, [parameters])] = engine._llm.calls
        assert ("seed" in parameters) == seeded


def test_a_cpu_build_without_the_known_function_is_refused(vllm, tiny_model_dir):
    del sys.modules["vllm.model_executor.layers.utils"].dispatch_cpu_unquantized_gemm
    with pytest.raises(EngineError, match="reload"):
        VllmEngine(tiny_model_dir, device="cpu")
    VllmEngine(tiny_model_dir, device="cuda")


@pytest.mark.parametrize("option", ["top_p", "top_k", "min_p", "repetition_penalty", "colour"])
def test_options_that_change_the_distribution_are_refused(vllm, tiny_model_dir, option):
    with pytest.raises(ConfigError, match=option):
        VllmEngine(tiny_model_dir, device="cpu", **{option: 0.9})


def test_low_precision_on_a_cpu_is_refused(vllm, tiny_model_dir):
    with pytest.raises(ConfigError, match="float32"):
        VllmEngine(tiny_model_dir, device="cpu", dtype="bfloat16")


def test_without_vllm_the_error_names_the_way_out(monkeypatch, tiny_model_dir):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match="engine.name=transformers"):
        VllmEngine(tiny_model_dir, device="cuda")
