"""Proof that an engine serves the weights it was told to load.

Engines have reported a successful reload while serving old or scrambled weights. So after every sync a fixed sequence is
scored twice, by the engine and by a plain forward pass over the safetensors on disk, and a difference stops the run
before a single token is sampled.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from data.seeds import derive_seed
from schemas.errors import EngineError
from stages.engines import Engine

PROBE_TOKENS = 24


def probe_tokens(vocabulary: int) -> list[int]:
    """A fixed sequence of ids for a vocabulary size; nothing about it depends on weights or run."""
    generator = np.random.Generator(np.random.PCG64(derive_seed(0, "probe", vocabulary)))
    return [int(token) for token in generator.integers(0, vocabulary, size=PROBE_TOKENS)]


def reference_logprobs(model_dir: Path, tokens: list[int], dtype: str, temperature: float) -> np.ndarray:
    """log pi(token t | tokens < t) at `temperature` for t >= 1, `(L - 1,)`, straight from the files in `model_dir`."""
    import torch

    from stages.checkpoints import load_model

    model = load_model(model_dir, dtype).eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].double().numpy()


def check_served_weights(
    engine: Engine, model_dir: Path, weights_sha256: str, *, dtype: str, temperature: float, max_gap: float
) -> float:
    """Largest gap between the engine's and the files' log-probabilities on the probe.

    Raises EngineError when the mean gap exceeds `max_gap`, when a value is not finite, or when the engine names other
    weights than `weights_sha256`.
    """
    if engine.weights_sha256 != weights_sha256:
        raise EngineError(
            "the engine names other weights than it was given",
            where=str(model_dir),
            expected=weights_sha256[:12],
            found=str(engine.weights_sha256)[:12],
        )
    vocabulary = int(json.loads((model_dir / "config.json").read_text())["vocab_size"])
    tokens = probe_tokens(vocabulary)
    served = np.asarray(engine.score([tokens], temperature)[0], np.float64)
    gap = np.abs(served - reference_logprobs(model_dir, tokens, dtype, temperature))
    # float32 engines agree to 1e-4; lower precision needs the run's own tolerance.
    allowed = min(max_gap, 1e-3) if dtype == "float32" else max_gap
    if not np.all(np.isfinite(gap)) or float(gap.mean()) > allowed:
        raise EngineError(
            "the engine does not serve the weights it was given",
            where=str(model_dir),
            expected=f"mean log-probability gap <= {allowed:g} on the probe",
            found=f"{float(gap.mean()):.3g}",
            remedy="restart the engine, or try engine.name=transformers",
        )
    return float(gap.max())
