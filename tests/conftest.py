"""Fixtures shared by all tests: one thread, and the tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from tests.tiny_model import save_tiny, tiny_module, tiny_tokenizer


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What can be made again (generated indexes, caches) is kept apart from the user's; subprocesses inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RSIPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("RSIPO_RETRIEVER_URL", raising=False)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a ChatML template; not to be changed."""
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def module() -> Qwen2ForCausalLM:
    """A random tiny Qwen2 model; not to be changed."""
    return tiny_module()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model and tokenizer as a directory in HF layout."""
    return save_tiny(tmp_path_factory.mktemp("tiny-model"))
