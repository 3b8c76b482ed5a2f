"""The transformers engine: what is sampled depends on seeds and prompts alone, and log-probabilities are the policy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import MistralConfig, MistralForCausalLM

from schemas.errors import ConfigError, EngineError
from stages.engines import GenerationRequest, build_engine
from stages.engines.sampling import choose, reply_uniforms
from stages.engines.transformers_engine import TransformersEngine
from tests.tiny_model import save_tiny, tiny_module


def prompts_of(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    random = np.random.Generator(np.random.Philox(key=seed))
    return [random.integers(7, 320, random.integers(1, longest)).tolist() for _ in range(count)]


def requests_of(prompts: list[list[int]], temperature: float = 1.0, tokens: int = 12) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, tokens, 1000 + i, temperature) for i, prompt in enumerate(prompts)]


def plain_logprobs(module: torch.nn.Module, prompt: list[int], reply: list[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([prompt + reply])).logits[0].double() / (temperature or 1.0)
    logprobs = torch.log_softmax(logits, dim=-1)
    return [float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(reply)]


@pytest.fixture
def engine(module, tokenizer) -> TransformersEngine:
    return TransformersEngine.from_module(module, tokenizer)


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0])
def test_samples_do_not_depend_on_the_batch(engine, temperature):
    requests = requests_of(prompts_of(36), temperature, tokens=8)
    whole = engine.generate(requests)
    for size in (1, 7):
        pieces = [result for i in range(0, 36, size) for result in engine.generate(requests[i : i + size])]
        assert [r.token_ids for r in pieces] == [r.token_ids for r in whole]
        assert [r.stop_reason for r in pieces] == [r.stop_reason for r in whole]
        for a, b in zip(pieces, whole, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    assert len({tuple(r.token_ids) for r in whole}) > 24


def test_a_close_decision_is_taken_from_the_lone_row(module, tokenizer):
    """With a margin that calls every decision close, the batch's own logits decide nothing."""
    requests = requests_of(prompts_of(9))
    always = TransformersEngine.from_module(module, tokenizer, tie_margin=2.0)
    lone = TransformersEngine.from_module(module, tokenizer, batch_sequences=1, tie_margin=2.0)
    results = always.generate(requests)
    assert always.recomputed == always.sampled == sum(len(r.token_ids) for r in results)
    for a, b in zip(results, lone.generate(requests), strict=True):
        assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_those_of_the_policy_at_the_sampling_temperature(engine, module, temperature):
    requests = requests_of(prompts_of(8), temperature)
    for request, result in zip(requests, engine.generate(requests), strict=True):
        expected = plain_logprobs(module, list(request.prompt_ids), result.token_ids, temperature)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-5)


def test_greedy_replies_take_the_largest_logit(engine, module):
    [request] = requests_of(prompts_of(1), temperature=0.0)
    [result] = engine.generate([request])
    ids = list(request.prompt_ids)
    for token in result.token_ids:
        with torch.no_grad():
            assert token == int(module(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)


def test_sampled_frequencies_follow_the_distribution(engine, module):
    prompt = prompts_of(1)[0]
    draws = engine.generate([GenerationRequest(prompt, 1, seed, 1.0) for seed in range(3000)])
    with torch.no_grad():
        probabilities = torch.softmax(module(input_ids=torch.tensor([prompt])).logits[0, -1].double(), -1).numpy()
    counts = np.bincount([r.token_ids[0] for r in draws], minlength=320)
    tolerance = 5 * np.sqrt(3000 * probabilities * (1 - probabilities)) + 1
    assert (np.abs(counts - 3000 * probabilities) <= tolerance).all()


def test_replies_end_at_the_end_of_turn_or_the_limit(engine, tokenizer):
    results = engine.generate(requests_of(prompts_of(64), temperature=2.0, tokens=60))
    assert {r.stop_reason for r in results} == {"eos", "length"}
    for result in results:
        ended = result.token_ids[-1] in engine.eos_ids
        assert result.stop_reason == ("eos" if ended else "length")
        assert not set(result.token_ids[:-1]) & engine.eos_ids
        assert ended or len(result.token_ids) == 60
        assert len(result.logprobs) == len(result.token_ids)


def conversation(engine: TransformersEngine, named: bool, rows: int = 14, turns: int = 3):
    """Turns of growing sequences; rows drop out now and then, as episodes do."""
    sequences = prompts_of(rows, seed=5)
    alive = list(range(rows))
    record = []
    for turn in range(turns):
        requests = [
            GenerationRequest(sequences[i], 10, 100 * i + turn, 1.0, session=f"episode {i}" if named else None)
            for i in alive
        ]
        results = engine.generate(requests)
        record.append([(i, r.token_ids, r.logprobs) for i, r in zip(alive, results, strict=True)])
        for i, result in zip(alive, results, strict=True):
            sequences[i] = [*sequences[i], *result.token_ids, *prompts_of(1, seed=31 * i + turn, longest=30)[0]]
        alive = [i for i in alive if (i + turn) % 5]
    return record


@pytest.mark.parametrize("options", [{}, {"batch_sequences": 5}, {"cache_gib": 1e-5}, {"cache_gib": 2e-4}])
def test_sessions_change_nothing_but_the_work(module, tokenizer, options):
    plain = conversation(TransformersEngine.from_module(module, tokenizer), named=False)
    cached = conversation(TransformersEngine.from_module(module, tokenizer, **options), named=True)
    for a, b in zip(plain, cached, strict=True):
        assert [(i, ids) for i, ids, _ in a] == [(i, ids) for i, ids, _ in b]
        for (_, _, left), (_, _, right) in zip(a, b, strict=True):
            np.testing.assert_allclose(left, right, atol=1e-5)


def test_a_session_prefills_only_what_is_new(engine):
    prompt = prompts_of(1, longest=40)[0]
    [first] = engine.generate([GenerationRequest(prompt, 5, 1, 1.0, "a")])
    lengths = []
    prefill = engine._decoder._prefill
    engine._decoder._prefill = lambda group: lengths.extend(len(r.ids) - r.stored for r in group) or prefill(group)
    engine.generate([GenerationRequest([*prompt, *first.token_ids, 9, 9, 9], 5, 2, 1.0, "a")])
    engine.end_sessions()
    engine.generate([GenerationRequest([*prompt, *first.token_ids, 9, 9, 9], 5, 2, 1.0, "a")])
    assert lengths == [4, len(prompt) + len(first.token_ids) + 3]  # the last sampled id was never fed


def test_a_session_whose_prompt_departs_from_its_past_is_still_right(engine):
    prompt = prompts_of(1, longest=40)[0]
    engine.generate([GenerationRequest(prompt, 5, 1, 1.0, "a")])
    departed = GenerationRequest([*prompt[: len(prompt) // 2], 11, 12], 8, 3, 1.0, "a")
    [with_past] = engine.generate([departed])
    engine.end_sessions()
    [without] = engine.generate([departed])
    assert with_past.token_ids == without.token_ids


def test_loading_weights_replaces_them_in_place_and_drops_the_caches(tmp_path):
    first, second = save_tiny(tmp_path / "a", seed=1), save_tiny(tmp_path / "b", seed=2)
    served = TransformersEngine(first, threads=1)
    expected = TransformersEngine(second, threads=1)
    requests = [GenerationRequest(p, 10, i, 1.0, session=str(i)) for i, p in enumerate(prompts_of(6))]
    before = served.generate(requests)
    served.load_weights(second, "b" * 64)
    after = served.generate(requests)
    assert served.weights_sha256 == "b" * 64
    assert [r.token_ids for r in before] != [r.token_ids for r in after]
    assert [r.token_ids for r in after] == [r.token_ids for r in expected.generate(requests)]
    assert served.module.lm_head.weight is served.module.model.embed_tokens.weight


@pytest.mark.parametrize("damage", ["shape", "nan", "missing", "unknown", "truncated"])
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(tmp_path, damage):
    good, bad = save_tiny(tmp_path / "good", seed=1), save_tiny(tmp_path / "bad", seed=2)
    file = bad / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if damage == "shape":
        tensors[name] = tensors[name][:-1].clone()
    elif damage == "nan":
        tensors[name][0, 0] = float("nan")
    elif damage == "missing":
        del tensors[name]
    elif damage == "unknown":
        tensors["model.layers.7.mlp.up_proj.weight"] = tensors[name].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    served = TransformersEngine(good, threads=1)
    requests = requests_of(prompts_of(3))
    before = served.generate(requests)
    with pytest.raises(EngineError):
        served.load_weights(bad, "c" * 64)
    assert served.weights_sha256 is None
    assert [r.logprobs for r in served.generate(requests)] == [r.logprobs for r in before]


def test_a_checkpoint_with_a_missing_tensor_is_not_loaded(tmp_path):
    directory = save_tiny(tmp_path / "model")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(EngineError, match="q_proj"):
        TransformersEngine(directory, threads=1)


def test_scores_equal_the_recorded_logprobs_and_ignore_order(engine):
    requests = requests_of(prompts_of(10), temperature=0.7)
    results = engine.generate(requests)
    sequences = [[*q.prompt_ids, *r.token_ids] for q, r in zip(requests, results, strict=True)]
    scores = engine.score(sequences, 0.7)
    for request, result, row in zip(requests, results, scores, strict=True):
        assert len(row) == len(request.prompt_ids) + len(result.token_ids) - 1
        np.testing.assert_allclose(row[len(request.prompt_ids) - 1 :], result.logprobs, atol=1e-5)
    for a, b in zip(engine.score(sequences[::-1], 0.7)[::-1], scores, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert engine.score([[5], []], 1.0) == [[], []]


def test_a_sliding_window_model_is_served_by_the_padded_decoder(tokenizer):
    config = MistralConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, max_position_embeddings=512,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = MistralForCausalLM(config)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.mul_(1.0 if "norm" in name else 4.0)
    module = module.eval().requires_grad_(False)
    engine = TransformersEngine.from_module(module, tokenizer)
    assert engine.decoder_name == "padded"
    requests = requests_of(prompts_of(10))
    whole = engine.generate(requests)
    single = TransformersEngine.from_module(module, tokenizer, decoder="single").generate(requests)
    assert [r.token_ids for r in whole] == [r.token_ids for r in single]
    for request, result in zip(requests, whole, strict=True):
        expected = plain_logprobs(module, list(request.prompt_ids), result.token_ids, 1.0)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-5)
    with pytest.raises(EngineError, match="cannot serve"):
        TransformersEngine.from_module(module, tokenizer, decoder="slots")


def test_a_damaged_model_fails_loudly(tokenizer):
    broken = tiny_module(seed=3)
    engine = TransformersEngine.from_module(broken, tokenizer)
    broken.model.norm.weight[0] = float("nan")
    with pytest.raises(EngineError, match="not finite"):
        engine.generate(requests_of(prompts_of(3)))


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest([], 5, 0, 1.0),
        GenerationRequest([1], 0, 0, 1.0),
        GenerationRequest([1], 5, 0, -1.0),
        GenerationRequest([320], 5, 0, 1.0),
        GenerationRequest([1] * 4090, 7, 0, 1.0),
    ],
)
def test_requests_that_cannot_be_served_are_refused(engine, request_):
    with pytest.raises(EngineError):
        engine.generate([request_])


def test_one_session_twice_in_a_call_is_refused(engine):
    with pytest.raises(EngineError, match="session"):
        engine.generate([GenerationRequest([1], 5, 0, 1.0, "a")] * 2)


def test_the_engine_counts_every_token_it_reports(engine):
    heard: list[int] = []
    results = engine.generate(requests_of(prompts_of(20)), heard.append)
    assert sum(heard) == sum(len(r.token_ids) for r in results)


def test_engines_are_built_by_name(tiny_model_dir):
    built = build_engine(
        "transformers", tiny_model_dir, dtype="float32", threads=1, batch_sequences=4, options={"cache_gib": 0.5}
    )
    assert built.decoder_name == "slots" and len(built.generate(requests_of(prompts_of(6)))) == 6


@pytest.mark.parametrize("options", [{"cache_gb": 1}, {"dtype": "bfloat16"}])
def test_options_that_an_engine_does_not_take_are_a_configuration_error(tiny_model_dir, options):
    with pytest.raises(ConfigError, match=f"engine.options.*{next(iter(options))}"):
        build_engine("transformers", tiny_model_dir, dtype="float32", threads=1, batch_sequences=4, options=options)


@given(st.integers(0, 2**63 - 1), st.integers(1, 30), st.integers(1, 30))
def test_a_uniform_depends_on_seed_and_position_only(seed, short, long):
    count = min(short, long)
    assert (reply_uniforms(seed, short)[:count] == reply_uniforms(seed, long)[:count]).all()


@settings(max_examples=60)
@given(st.data())
def test_the_inverse_cdf_picks_the_interval_that_holds_the_uniform(data):
    width = data.draw(st.integers(2, 12))
    logits = data.draw(st.lists(st.one_of(st.floats(-20, 20), st.just(-np.inf)), min_size=width, max_size=width))
    if not np.isfinite(logits).any():
        logits[0] = 0.0
    uniform = data.draw(st.floats(0, 1, exclude_max=True))
    choice = choose(
        torch.tensor([logits]),
        torch.tensor([uniform], dtype=torch.float64),
        torch.tensor([1.0], dtype=torch.float64),
        0.0,
    )
    token = int(choice.tokens[0])
    weights = np.exp(np.float64(np.float32(logits)) - np.max(np.float32(logits)))
    cdf = np.cumsum(weights) / weights.sum()
    assert weights[token] > 0
    assert cdf[token] >= uniform - 1e-9 and (token == 0 or cdf[token - 1] <= uniform + 1e-9)


def test_decisions_near_an_edge_are_marked():
    logits = torch.log(torch.tensor([[0.25, 0.5, 0.25]] * 5))
    uniforms = torch.tensor([0.25 + 5e-5, 0.75 - 5e-5, 0.5, 1e-6, 1 - 1e-6], dtype=torch.float64)
    choice = choose(logits, uniforms, torch.ones(5, dtype=torch.float64), 1e-4)
    assert choice.near_tie.tolist() == [True, True, False, False, False]  # 0 and 1 are no edges between tokens
    greedy = choose(torch.tensor([[1.0, 1.0005], [1.0, 2.0]]), uniforms[:2], torch.zeros(2, dtype=torch.float64), 1e-4)
    assert greedy.near_tie.tolist() == [True, False] and greedy.tokens.tolist() == [1, 1]
