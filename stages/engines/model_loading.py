"""Loading a causal language model for generation, and copying new weights into it in place.

Only safetensors are read and no code from a model repository runs. A parameter that the files do not hold is an error: a
model with some freshly initialised weights generates text that looks almost right.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from schemas.errors import EngineError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_tokenizer(model_dir: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub name. Raises EngineError when it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(
            str(model_dir), trust_remote_code=False, local_files_only=Path(model_dir).is_dir()
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise EngineError("cannot load the tokenizer", where=str(model_dir), found=_first_line(error)) from error


def load_module(model_dir: Path | str, dtype: str, device: str) -> PreTrainedModel:
    """The model in evaluation mode on `device`, parameters of `dtype` without gradients.

    Raises EngineError for an unknown dtype, unreadable files, and weights that are missing or of another shape.
    """
    if dtype not in DTYPES:
        raise EngineError("unknown dtype", where="model.dtype", expected=" or ".join(DTYPES), found=dtype)
    disable_progress_bar()
    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            str(model_dir),
            dtype=DTYPES[dtype],
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=Path(model_dir).is_dir(),
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise EngineError("cannot load the model", where=str(model_dir), found=_first_line(error)) from error
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            names = ", ".join(sorted(str(name) for name in info[problem])[:3])
            raise EngineError(
                "the checkpoint does not fill the model",
                where=str(model_dir),
                expected="every parameter in the safetensors files",
                found=f"{problem.replace('_', ' ')}: {names}",
                remedy="export the checkpoint again",
            )
    return module.eval().requires_grad_(False).to(device)


@torch.no_grad()
def copy_weights(module: torch.nn.Module, model_dir: Path) -> None:
    """Overwrite the parameters of `module` with those of `model_dir` (HF layout, safetensors, one or several files).

    Everything is checked before anything is written: names (tied parameters may be left out, as `save_pretrained` does),
    shapes, finite values. Raises EngineError otherwise, and the module keeps its weights.
    """
    state = module.state_dict(keep_vars=True)
    files = _weight_files(model_dir)
    seen: set[str] = set()
    for file in files:
        with _opened(file) as tensors:
            for name in sorted(tensors.keys()):
                _check_tensor(tensors.get_tensor(name), state.get(name), name, file)
                seen.add(name)
    filled = {state[name].data_ptr() for name in seen}
    missing = sorted(name for name in state if name not in seen and state[name].data_ptr() not in filled)
    if missing:
        raise _mismatch(model_dir, "every parameter of the model", f"no tensor for {', '.join(missing[:3])}")
    for file in files:
        with _opened(file) as tensors:
            for name in sorted(tensors.keys()):
                state[name].copy_(tensors.get_tensor(name))


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [model_dir / name for name in names]
    return [model_dir / "model.safetensors"]


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(str(file), framework="pt")
    except Exception as error:  # safetensors raises its own class for a damaged header, OSError for a missing file
        raise EngineError("cannot read the weights", where=str(file), found=_first_line(error)) from error


def _check_tensor(tensor: torch.Tensor, target: torch.Tensor | None, name: str, file: Path) -> None:
    if target is None:
        raise _mismatch(file, "parameters of the model that is loaded", f"unknown tensor {name}")
    if tensor.shape != target.shape:
        raise _mismatch(file, f"{name} of shape {tuple(target.shape)}", f"shape {tuple(tensor.shape)}")
    if not bool(torch.isfinite(tensor).all()):
        raise _mismatch(file, "finite values", f"NaN or infinity in {name}")


def _mismatch(where: Path, expected: str, found: str) -> EngineError:
    return EngineError("the weights do not fit the model", where=str(where), expected=expected, found=found)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
