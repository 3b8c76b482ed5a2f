"""Texts as vectors, by an embedding model of transformers: encoder, pooling, optional length 1.

The model is a directory or a hub name, weights in safetensors only, no code that comes with a model. Its identity is the
hash of its weights and of the files that say how it computes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from schemas.artifacts import sha256_file, sha256_json
from schemas.errors import ArtifactError, ConfigError, NumericsError

Pooling = Literal["mean", "cls"]

# Files besides the weights that decide a vector.
_DECIDING = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_DECIDING += ("vocab.json", "merges.txt", "tokenizer.model", "sentencepiece.bpe.model", "added_tokens.json")


def model_directory(model: str) -> Path:
    """The directory of a model given by directory or hub name. Raises ConfigError when there is none."""
    from data.model_files import resolve_model

    try:
        return resolve_model(model)
    except ConfigError as error:
        raise ConfigError(
            error.what, where="model", expected=error.expected, found=error.found, remedy=error.remedy
        ) from error


def model_sha256(directory: Path) -> str:
    """Hash of the weights, the configuration and the tokenizer."""
    from data.model_files import weights_sha256

    files = {name: sha256_file(directory / name) for name in _DECIDING if (directory / name).is_file()}
    return sha256_json({"weights": weights_sha256(directory), "files": files})


class Embedder:
    """An embedding model in memory. Raises ConfigError when it cannot be loaded as an encoder."""

    def __init__(self, directory: Path, *, pooling: Pooling, max_length: int, normalise: bool) -> None:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                directory, trust_remote_code=False, local_files_only=True
            )
            model, report = transformers.AutoModel.from_pretrained(
                directory,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # configuration, tokenizer and weights each raise kinds of their own
            raise ConfigError(
                "cannot load the embedding model",
                where=str(directory),
                expected="an encoder with a tokenizer and safetensors weights",
                found=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300],
            ) from error
        # A pooler that nothing here uses is often absent from the files of embedding models.
        if missing := sorted(str(key) for key in report["missing_keys"] if "pooler" not in str(key)):
            raise ArtifactError(
                "weights of the embedding model are missing", where=str(directory), found=", ".join(missing[:3])
            )
        longest = getattr(model.config, "max_position_embeddings", None)
        if longest is not None and max_length > longest:
            raise ConfigError(
                "longer than the embedding model can read",
                where="max_length",
                expected=f"<= {longest}",
                found=max_length,
            )
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.eval().to(self._device)
        self._pooling, self._max_length, self._normalise = pooling, max_length, normalise

    @property
    def dimensions(self) -> int:
        """Length of a vector."""
        return int(self._model.config.hidden_size)

    def batch(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of texts that are computed together; float32, shape (texts, dimensions).

        The last bits depend on what else is in the batch. Raises NumericsError for a vector that is not finite.
        """
        import torch

        options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": self._max_length}
        encoded = self._tokenizer(list(texts), return_tensors="pt", **options).to(self._device)
        with torch.inference_mode():
            hidden = self._model(**encoded).last_hidden_state  # (texts, tokens, dimensions)
            if self._pooling == "cls":
                pooled = hidden[:, 0]
            else:
                mask = encoded["attention_mask"].unsqueeze(-1).to(hidden.dtype)
                pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            if self._normalise:
                pooled = torch.nn.functional.normalize(pooled, dim=1)
        vectors = pooled.cpu().numpy().astype(np.float32)
        if not np.isfinite(vectors).all():
            raise NumericsError("the embedding model gives a vector that is not finite", where=ascii(texts[0][:60]))
        return vectors

    def one(self, text: str) -> np.ndarray:
        """The vector of one text, a function of this text alone; float32, shape (dimensions,)."""
        return self.batch([text])[0]

    def many(self, texts: Sequence[str], size: int = 32) -> np.ndarray:
        """Vectors of many texts, in batches of similar length that depend on these texts alone."""
        order = sorted(range(len(texts)), key=lambda number: (len(texts[number]), number))
        vectors = np.empty((len(texts), self.dimensions), np.float32)
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            vectors[chosen] = self.batch([texts[number] for number in chosen])
        return vectors


@functools.lru_cache(maxsize=2)
def load_embedder(directory: Path, pooling: Pooling, max_length: int, normalise: bool) -> Embedder:
    """An embedder, kept for the next one who asks: building and asking in one process load it once."""
    return Embedder(directory, pooling=pooling, max_length=max_length, normalise=normalise)
