"""Model checkpoints: how a model (`data.model_files`) is loaded, and how one becomes an artefact.

A checkpoint `checkpoints/step=00001/` holds `model/` (Hugging Face layout: config.json, model.safetensors, tokenizer
files) and `optimizer/` (safetensors of the optimiser state by parameter name, state.json); its manifest names
`weights_sha256`. Nothing here unpickles, and nothing runs code that comes with a model.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.model_files import resolve_model, tensor_entries, weight_files, weights_sha256
from schemas.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from schemas.artifacts import Manifest
    from schemas.run_directory import RunDirectory

KIND = "checkpoint"
SFT_WORK = "sft"  # in a run directory: what sft-skills has made so far; gone when checkpoint 0 is published
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def load_model(model_dir: Path, dtype: str = "float32") -> PreTrainedModel:
    """The causal language model of a directory, every weight from its files. `dtype`: float32 or bfloat16.

    Raises ArtifactError when a weight is missing, has another shape, or would be newly initialised.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # configuration, weights and model classes each raise kinds of their own
        raise ArtifactError(
            "cannot load the model",
            where=str(model_dir),
            expected="config.json and safetensors of a causal language model",
            found=_first_line(error),
            remedy="copy the model again, or choose another model.path",
        ) from error
    missing = sorted(str(key) for key in report["missing_keys"])
    mismatched = sorted(str(entry[0]) for entry in report.get("mismatched_keys", ()))
    if missing or mismatched:
        raise ArtifactError(
            "weights of the model are missing and would be newly initialised",
            where=str(model_dir),
            expected="every parameter in the safetensors files",
            found=", ".join((missing + mismatched)[:3]),
        )
    return model


def load_tokenizer(model_dir: Path) -> Any:
    """The tokenizer of a model directory. ConfigError when it cannot be loaded or has no chat template."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            model_dir, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # the tokenizers library raises bare exceptions for a file it cannot read
        raise ConfigError(
            "cannot load the model's tokenizer",
            where=str(model_dir),
            expected="tokenizer files that transformers reads",
            found=_first_line(error),
            remedy="copy the model again, or choose another model.path",
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            "the tokenizer has no chat template",
            where=str(model_dir),
            expected="chat_template.jinja or chat_template in tokenizer_config.json",
            remedy="take an instruct model, or add a template",
        )
    return tokenizer


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}"[:300] if lines else type(error).__name__


def import_model(source: Path, target: Path, dtype: str = "float32") -> str:
    """Write the model of `source` to `target/` in our layout, checked; returns its weights hash.

    One safetensors file, tokenizer files copied byte by byte. Raises ConfigError or ArtifactError for a model that
    cannot be used: no chat template or one that fails, a vocabulary larger than the embedding, weights that are missing.
    """
    from stages.rendering import end_of_turn_ids, generation_eos_ids

    tokenizer = load_tokenizer(source)
    end_of_turn_ids(tokenizer)  # the template renders; a copy that cannot be used must not become checkpoint 0
    generation_eos_ids(source)
    model = load_model(source, dtype)
    embedded = int(model.get_input_embeddings().weight.shape[0])
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= embedded:
        raise ConfigError(
            "the tokenizer's vocabulary does not fit the model",
            where=str(source),
            expected=f"ids below {embedded}, the rows of the embedding",
            found=f"id {largest}",
            remedy="take the tokenizer that belongs to the model, or resize its embedding",
        )
    target.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(target)
    copy_tokenizer_files(source, target)
    _save_tensors(target, _own_tensors(model))
    return weights_sha256(target)


def _own_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; of tied parameters only the first, from which loading ties the others."""
    state = model.state_dict()
    parameters = dict(model.named_parameters())
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(parameters)
    return {name: tensor for name, tensor in state.items() if name not in shared}


def _save_tensors(target: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    ordered = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    save_file(ordered, target / "model.safetensors", metadata={"format": "pt"})


def copy_tokenizer_files(source: Path, target: Path) -> None:
    """Copy tokenizer, template and generation settings unchanged."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def write_weights(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write `tensors` as the model of `target`, with configuration and tokenizer of `source`.

    The key set must be that of `source`, tied copies left out. Raises ArtifactError otherwise, or for an empty tensor.
    """
    expected = tensor_entries(source)
    if set(tensors) != set(expected):
        different = sorted(set(tensors) ^ set(expected))
        raise ArtifactError("the trained model has other tensors", where=str(source), found=", ".join(different[:3]))
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name].shape or math.prod(tensor.shape) == 0:
            raise ArtifactError(
                "a trained tensor has another shape",
                where=name,
                expected=expected[name].shape,
                found=tuple(tensor.shape),
            )
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / "config.json", target / "config.json")
    copy_tokenizer_files(source, target)
    _save_tensors(target, tensors)


def publish_initial_checkpoint(run: RunDirectory) -> Manifest:
    """`checkpoints/step=00000` from `model.path`, unless `sft-skills` or an earlier start has made it; its manifest.

    Making it takes the run's lock, whoever asks: LockError when another process has it. Reading it does not.
    """
    from schemas.artifacts import read_manifest

    target = run.checkpoint_dir(0)
    if not (target / "manifest.json").is_file():
        with run.lock():
            if not (target / "manifest.json").is_file():
                return _publish_initial(run, target)
    return read_manifest(target, verify=False)


def _publish_initial(run: RunDirectory, target: Path) -> Manifest:
    """Import `model.path`. ArtifactError where that would pass over a fine-tuning that has not ended, and when the run has
    begun with other weights: they are lost, and starting over in silence would lose the training as well."""
    from schemas.artifacts import publish_directory, sha256_json

    if (run.root / SFT_WORK).exists():
        raise ArtifactError(
            "sft-skills has begun to make checkpoint 0 and not ended",
            where=str(run.root / SFT_WORK),
            remedy="finish it with the same rsipo sft-skills command, or remove this directory to begin with model.path",
        )
    model = run.config.model
    source = resolve_model(model.path, model.revision)
    extra: dict[str, Any] = {}

    def write(directory: Path) -> None:
        found = import_model(source, directory / "model", model.dtype)
        began_with = _first_played_weights(run)
        if began_with not in (None, found):
            raise ArtifactError(
                "the run began with other weights than those of model.path, and they are gone",
                where=str(target),
                expected=f"weights {began_with[:12]}",
                found=f"weights {found[:12]}",
                remedy="copy the checkpoint back, make it again with rsipo sft-skills, or start another run",
            )
        extra["weights_sha256"] = found

    inputs = {"model": sha256_json(model.model_dump(mode="json")), "source_weights": weights_sha256(source)}
    return publish_directory(target, kind=KIND, inputs=inputs, write=write, extra=extra)


def _first_played_weights(run: RunDirectory) -> str | None:
    """The weights hash that the record of step 1 names; None where there is none to be read."""
    from schemas.artifacts import read_manifest

    try:
        return read_manifest(run.step_dir("rollouts", 1), verify=False).inputs.get("weights")
    except ArtifactError:
        return None


def verify_checkpoint(run: RunDirectory, step: int) -> Manifest:
    """Compare every byte of checkpoint `step` with its manifest; ArtifactError that says how to get it back."""
    from schemas.artifacts import read_manifest

    remedy = f"make it again with: rsipo train-step --run {run.root} --step {step} --force"
    if step == 0:
        remedy = "make it again with rsipo sft-skills --force; where it is model.path as it was, remove it and go on"
    return read_manifest(run.checkpoint_dir(step), remedy=remedy)


def next_checkpoint_bytes(model_dir: Path, dtype: str) -> int:
    """Most bytes that the checkpoint after `model_dir` takes, with a tenth to spare.

    AdamW keeps two float32 moments of each weight, and a float32 master beside a weight that is narrower.
    """
    weights = sum(file.stat().st_size for file in weight_files(model_dir))
    return round(1.1 * weights * (3 if dtype == "float32" else 7))


def checkpoints_to_remove(steps: Iterable[int], *, keep_last: int, keep_every: int) -> list[int]:
    """Which checkpoints retention removes: never step 0, the `keep_last` newest, or every `keep_every`-th (0: none).

    >>> checkpoints_to_remove(range(8), keep_last=2, keep_every=3)
    [1, 2, 4, 5]
    """
    ordered = sorted(steps)
    kept = {0, *ordered[-max(1, keep_last) :]} | {step for step in ordered if keep_every and step % keep_every == 0}
    return [step for step in ordered if step not in kept]


def apply_retention(run: RunDirectory, newest: int) -> list[int]:
    """Remove the checkpoints that `run.keep_last` and `run.keep_every` do not keep; the removed steps.

    Call it after checkpoint `newest` has been made and verified. Later ones are left alone and do not count: where a step
    is made again they are of the training before, and the next step needs the one just made. The manifest goes first: a
    checkpoint that is half removed is then incomplete, never damaged.
    """
    section = run.config.run
    steps = [step for step in run.finished_steps("checkpoints") if step <= newest]
    removed = checkpoints_to_remove(steps, keep_last=section.keep_last, keep_every=section.keep_every)
    for step in removed:
        directory = run.checkpoint_dir(step)
        (directory / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)
    return removed
