"""Where a model comes from, and what its weights hash to: directories, hub names and `bundled:NAME`.

Nothing here unpickles, and nothing runs code that comes with a model. The weights hash covers names, types, shapes and bytes
of the tensors, so it does not depend on sharding or metadata; it needs no tensor library.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    import torch

BUNDLED_PREFIX = "bundled:"
_READ_BYTES = 1 << 22


def resolve_model(path: str, revision: str | None = None) -> Path:
    """The directory of a model: `bundled:NAME`, a directory, or a hub name (only data files are downloaded).

    Raises ConfigError when there is no such model, when it holds no safetensors, or when a hub name cannot be fetched.
    """
    if path.startswith(BUNDLED_PREFIX):
        directory = _bundled(path.removeprefix(BUNDLED_PREFIX))
    elif Path(path).expanduser().is_dir():
        directory = Path(path).expanduser().resolve()
    elif path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ConfigError(
            "there is no such model directory",
            where="model.path",
            found=path,
            remedy="check the path, or use bundled:NAME",
        )
    else:
        directory = _from_hub(path, revision)
    _require_layout(directory, path)
    return directory


def _bundled(name: str) -> Path:
    policies = Path(str(importlib.resources.files("data"))) / "policies"
    known = sorted(entry.name for entry in policies.iterdir() if entry.is_dir()) if policies.is_dir() else []
    if name not in known:
        raise ConfigError(
            "there is no such bundled model",
            where="model.path",
            expected=" or ".join(f"{BUNDLED_PREFIX}{entry}" for entry in known) or "a package with bundled models",
            found=f"{BUNDLED_PREFIX}{name}",
        )
    return policies / name


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds: network, name, revision, licence, disk
        raise ConfigError(
            "cannot fetch the model",
            where="model.path",
            found=f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            remedy="check the name and the network, or download it and give its directory",
        ) from error


def _require_layout(directory: Path, path: str) -> None:
    if not (directory / "config.json").is_file():
        raise ConfigError("not a model directory", where="model.path", expected="config.json", found=path)
    if weight_files(directory):
        return
    pickled = sorted(file.name for suffix in ("*.bin", "*.pt", "*.pth") for file in directory.glob(suffix))
    raise ConfigError(
        "the model has no safetensors weights",
        where="model.path",
        expected="*.safetensors",
        found=f"{', '.join(pickled)} (pickled weights are never loaded)" if pickled else f"no weights in {path}",
        remedy="convert it with transformers' save_pretrained",
    )


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a model, sorted by name."""
    return sorted(model_dir.glob("*.safetensors"))


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file: its place in the file, in bytes."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def tensor_entries(model_dir: Path) -> dict[str, TensorEntry]:
    """Every tensor of a model, in order of the names. ArtifactError for a damaged file or a name that occurs twice."""
    found: dict[str, TensorEntry] = {}
    for file in weight_files(model_dir):
        for entry in _header(file):
            if entry.name in found:
                raise ArtifactError("a tensor occurs in two files of a model", where=str(file), found=entry.name)
            found[entry.name] = entry
    if not found:
        raise ArtifactError("a model without weights", where=str(model_dir), expected="model.safetensors")
    return dict(sorted(found.items()))


def _header(file: Path) -> Iterator[TensorEntry]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header: dict[str, Any] = json.loads(stream.read(length))
        for name, value in header.items():
            if name == "__metadata__":
                continue
            begin, end = value["data_offsets"]
            if not 0 <= begin <= end <= size - 8 - length:
                raise ValueError(f"tensor {name} ends beyond the file")
            yield TensorEntry(file, name, value["dtype"], tuple(value["shape"]), 8 + length + begin, end - begin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            "a damaged weights file", where=str(file), expected="safetensors", found=str(error), remedy="copy it again"
        ) from error


class WeightsHash:
    """sha256 over (name, type, shape, sha256 of the bytes) of tensors, added in any order."""

    def __init__(self) -> None:
        self._lines: dict[str, bytes] = {}

    def add(self, name: str, dtype: str, shape: Iterable[int], content: Iterable[bytes | memoryview]) -> None:
        """One tensor; `content` are the blocks of its bytes."""
        digest = hashlib.sha256()
        for block in content:
            digest.update(block)
        self._lines[name] = json.dumps([name, dtype, list(shape), digest.hexdigest()]).encode() + b"\n"

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """One tensor in memory, hashed as a checkpoint would store it."""
        import torch

        plain = tensor.detach().cpu().contiguous().reshape(-1)
        content = [memoryview(plain.view(torch.uint8).numpy())] if plain.numel() else []
        self.add(name, _DTYPE_NAMES.get(str(tensor.dtype), str(tensor.dtype)), tensor.shape, content)

    def hexdigest(self) -> str:
        """The hash of what was added."""
        return hashlib.sha256(b"".join(self._lines[name] for name in sorted(self._lines))).hexdigest()


_DTYPE_NAMES = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float64": "F64"}


def weights_sha256(model_dir: Path) -> str:
    """Hash of a model's weights on disk; equal for every sharding of the same tensors."""
    digest = WeightsHash()
    for entry in tensor_entries(model_dir).values():
        digest.add(entry.name, entry.dtype, entry.shape, _blocks(entry))
    return digest.hexdigest()


def _blocks(entry: TensorEntry) -> Iterator[bytes]:
    with entry.file.open("rb") as stream:
        stream.seek(entry.start)
        left = entry.size
        while left:
            block = stream.read(min(left, _READ_BYTES))
            if not block:
                raise ArtifactError("a truncated weights file", where=str(entry.file), found=entry.name)
            yield block
            left -= len(block)
