"""Which decoder serves a model, found out by a probe and never assumed.

`slots` is the fast one and needs full attention in every layer. `padded` uses the model's own cache on left-padded
batches. `single` is `padded` one reply at a time, for models that padding changes. A decoder is taken when the logits it
gives for a few random sequences (prefill, tokens one by one, a second turn) equal those of plain passes over the same ids.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from schemas.errors import EngineError
from stages.engines import GenerationRequest
from stages.engines.padded_decoding import PaddedDecoder
from stages.engines.reply import Decoder, Reply
from stages.engines.slot_cache import SlotPool
from stages.engines.slot_decoding import SlotDecoder, cache_argument

PROBE_LENGTHS = (3, 11, 7)
TOLERANCE = {torch.float32: 1e-3}  # of the largest logit
LOW_PRECISION_TOLERANCE = 5e-2


def choose_decoder(
    module: PreTrainedModel, wanted: str, batch_sequences: int, budget_bytes: int
) -> tuple[str, Decoder]:
    """The name and the decoder: `wanted`, or with "auto" the first that passes the probe.

    Raises EngineError when the wanted one (or all) fail: the model cannot be served rightly.
    """
    names = ("slots", "padded", "single") if wanted == "auto" else (wanted,)
    for name in names:
        decoder = _build(name, module, batch_sequences, budget_bytes)
        if decoder is not None and _agrees(decoder, module, rows=1 if name == "single" else len(PROBE_LENGTHS)):
            decoder.clear()
            return name, decoder
    raise EngineError(
        "this engine cannot serve the model rightly",
        where=type(module).__name__,
        expected="logits of cached decoding equal to those of plain passes",
        found=f"none for decoder {' or '.join(names)}",
        remedy="use engine.name=vllm, or engine.options.decoder=auto",
    )


def _build(name: str, module: PreTrainedModel, batch_sequences: int, budget_bytes: int) -> Decoder | None:
    if name == "padded":
        return PaddedDecoder(module, batch_sequences)
    if name == "single":
        return PaddedDecoder(module, 1)
    if name != "slots":
        raise EngineError(
            "unknown decoder", where="engine.options.decoder", expected="auto, slots, padded or single", found=name
        )
    shape = _cache_shape(module)
    if shape is None or not _attends_fully(module):
        return None
    layers, heads, head_size = shape
    pool = SlotPool(layers, heads, head_size, dtype=module.dtype, device=module.device, budget_bytes=budget_bytes)
    return SlotDecoder(module, pool)


def _attends_fully(module: PreTrainedModel) -> bool:
    """Whether the configuration says that every layer sees the whole sequence. A probe shorter than a window cannot."""
    config = module.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return all(layer_type == "full_attention" for layer_type in layer_types)
    return not getattr(config, "sliding_window", None) or getattr(config, "use_sliding_window", True) is False


@torch.inference_mode()
def _cache_shape(module: PreTrainedModel) -> tuple[int, int, int] | None:
    """(layers, key-value heads, head size) of the stock cache; None when keys, values or layers differ in shape."""
    cache = DynamicCache(config=module.config)
    ids = torch.zeros((1, 2), dtype=torch.long, device=module.device)
    module(input_ids=ids, use_cache=True, **{cache_argument(module): cache})
    shapes = set()
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or keys.shape != values.shape:
            return None
        shapes.add((keys.shape[1], keys.shape[3]))
    return (len(cache.layers), *shapes.pop()) if len(shapes) == 1 else None


@torch.inference_mode()
def _agrees(decoder: Decoder, module: PreTrainedModel, rows: int) -> bool:
    random = np.random.Generator(np.random.Philox(key=rows))
    vocabulary = int(module.get_input_embeddings().weight.shape[0])
    prompts = [random.integers(0, vocabulary, length).tolist() for length in PROBE_LENGTHS[:rows]]
    try:
        for turn in range(2):
            decoder.begin_call()
            replies = [
                Reply(row, GenerationRequest(prompt, max_new_tokens=4, seed=0, temperature=1.0, session=f"probe {row}"))
                for row, prompt in enumerate(prompts)
            ]
            logits = decoder.start(replies)
            for _ in range(3):
                if not _equal(module, replies, logits):
                    return False
                for reply in replies:
                    reply.append(int(random.integers(0, vocabulary)), 0.0, ())
                logits = decoder.step(replies)
            if not _equal(module, replies, logits):
                return False
            decoder.finish(replies)
            prompts = [[*reply.ids, *random.integers(0, vocabulary, 2 + turn).tolist()] for reply in replies]
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError):
        return False
    return True


def _equal(module: PreTrainedModel, replies: list[Reply], logits: torch.Tensor) -> bool:
    for reply, row in zip(replies, logits, strict=True):
        ids = torch.tensor([reply.ids], device=module.device)
        plain = module(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
        tolerance = TOLERANCE.get(module.dtype, LOW_PRECISION_TOLERANCE) * max(1.0, float(plain.abs().max()))
        if not bool(torch.allclose(row, plain, rtol=0.0, atol=tolerance)):
            return False
    return True
