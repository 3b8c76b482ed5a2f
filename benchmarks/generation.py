"""Tokens per second of our engine beside `transformers.generate`, on the same model, prompts and batch, in one run.

Episodes of several turns: each reply is followed by a fixed observation, as in the `append_only` mode. Three ways are
timed in turn, and the fastest of the repeats counts:

    sessions    our engine, the cache kept from turn to turn
    no sessions our engine, every turn's prompt computed anew
    generate    `model.generate`, left-padded, sampling at temperature 1 over the whole vocabulary

    python benchmarks/generation.py [--sequences 64] [--turns 6] [--reply 20] [--model DIR] [--threads 2]

On a busy machine read the second pair of columns, with one thread (waiting threads burn processor time).
Replies never stop early (end-of-turn ids are ignored by all three), so that each way samples the same number of tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from stages.engines import GenerationRequest
from stages.engines.transformers_engine import TransformersEngine
from stages.threads import set_threads
from tests.tiny_model import tiny_tokenizer

Generate = Callable[[list[list[int]], int], list[list[int]]]  # prompts and turn number to replies


def build_model(path: str | None) -> PreTrainedModel:
    """The model in `path`, or a random one: Qwen2, 4 layers, 128 wide, vocabulary of 2,048, 1.25 million parameters."""
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    module = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():  # as peaked as a trained model: most replies have one likely token at every place
        module.model.norm.weight.mul_(float(6 / module.lm_head.weight.std() / config.hidden_size**0.5))
    return module


def ours(engine: TransformersEngine, reply: int, sessions: bool) -> Generate:
    """Our engine as a function of prompts and turn."""

    def generate(prompts: list[list[int]], turn: int) -> list[list[int]]:
        if turn == 0:
            engine.end_sessions()
        requests = [
            GenerationRequest(prompt, reply, 1000 * turn + row, 1.0, f"{row}" if sessions else None)
            for row, prompt in enumerate(prompts)
        ]
        return [result.token_ids for result in engine.generate(requests)]

    return generate


def stock(module: PreTrainedModel, reply: int) -> Generate:
    """`model.generate` as a function of prompts and turn."""

    @torch.inference_mode()
    def generate(prompts: list[list[int]], turn: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        torch.manual_seed(turn)
        output = module.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=reply,
            min_new_tokens=reply,
            pad_token_id=0,
        )
        return output[:, longest:].tolist()

    return generate


def play_turns(
    generate: Generate, prompts: list[list[int]], observations: list[list[list[int]]]
) -> tuple[float, float]:
    """Seconds of wall clock and of processor time for all turns of all sequences."""
    sequences = [list(prompt) for prompt in prompts]
    wall, processor = time.perf_counter(), time.process_time()
    for turn, added in enumerate(observations):
        replies = generate(sequences, turn)
        sequences = [[*s, *reply, *seen] for s, reply, seen in zip(sequences, replies, added, strict=True)]
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--reply", type=int, default=20, help="tokens of every reply")
    parser.add_argument("--prompt", type=int, default=150, help="tokens of the longest opening")
    parser.add_argument("--observation", type=int, default=25, help="tokens of the longest later observation")
    parser.add_argument("--model", help="HF directory; default: a random model")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    set_threads(options.threads)
    module = build_model(options.model)
    vocabulary = module.get_input_embeddings().weight.shape[0]
    random = np.random.Generator(np.random.Philox(key=0))

    def some(longest: int) -> list[int]:
        return random.integers(10, vocabulary, random.integers(longest // 2, longest + 1)).tolist()

    prompts = [some(options.prompt) for _ in range(options.sequences)]
    observations = [[some(options.observation) for _ in prompts] for _ in range(options.turns)]
    engine = TransformersEngine.from_module(module, tiny_tokenizer(), batch_sequences=options.sequences)
    engine.eos_ids = frozenset()
    ways = {
        "sessions": ours(engine, options.reply, True),
        "no sessions": ours(engine, options.reply, False),
        "generate": stock(module, options.reply),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, way in ways.items():
            seconds[name].append(play_turns(way, prompts, observations))
    tokens = options.sequences * options.turns * options.reply
    print(
        f"{options.sequences} sequences x {options.turns} turns x {options.reply} tokens, {torch.get_num_threads()} threads"
    )
    print("                tokens per second                  tokens per second of processor time")
    wall_of_stock, processor_of_stock = (min(times) for times in zip(*seconds["generate"], strict=True))
    for name in ways:
        wall, processor = (min(times) for times in zip(*seconds[name], strict=True))
        print(
            f"{name:12} {tokens / wall:8,.0f}   {wall_of_stock / wall:5.2f} x generate"
            f"     {tokens / processor:8,.0f}   {processor_of_stock / processor:5.2f} x generate"
        )
    print(f"decisions taken again near a tie: {engine.recomputed / engine.sampled:.3%} of {engine.sampled:,}")


if __name__ == "__main__":
    main()
