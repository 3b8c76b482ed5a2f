"""Checkpoints: which models are accepted, what their hash covers, and what retention keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from data.model_files import WeightsHash, resolve_model, weights_sha256
from schemas.artifacts import read_manifest
from schemas.errors import ArtifactError, ConfigError
from schemas.run_directory import RunDirectory
from stages.checkpoints import (
    apply_retention,
    checkpoints_to_remove,
    import_model,
    load_model,
    load_tokenizer,
    publish_initial_checkpoint,
    write_weights,
)
from tests.random_policy import VOCABULARY, write_policy
from tests.small_world import small_config


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return write_policy(tmp_path / "policy")


def test_the_weights_hash_does_not_depend_on_sharding_or_metadata(policy: Path) -> None:
    whole = weights_sha256(policy)
    tensors = load_file(policy / "model.safetensors")
    digest = WeightsHash()
    for name in sorted(tensors, reverse=True):
        digest.add_tensor(name, tensors[name])
    assert digest.hexdigest() == whole
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:3]}, policy / "b.safetensors", metadata={"other": "facts"})
    save_file({name: tensors[name] for name in names[3:]}, policy / "a.safetensors")
    (policy / "model.safetensors").unlink()
    assert weights_sha256(policy) == whole


def test_the_weights_hash_changes_with_a_bit_a_name_a_shape_or_a_type(policy: Path) -> None:
    tensors = load_file(policy / "model.safetensors")
    seen = {weights_sha256(policy)}
    name = "model.norm.weight"
    changed = tensors[name].clone()
    changed.view(torch.int32)[0] ^= 1
    for variant in (
        {**tensors, name: changed},
        {("model.norm.other" if key == name else key): value for key, value in tensors.items()},
        {**tensors, name: tensors[name].reshape(2, -1)},
        {**tensors, name: tensors[name].view(torch.int32)},
    ):
        save_file(variant, policy / "model.safetensors")
        seen.add(weights_sha256(policy))
    assert len(seen) == 5


@pytest.mark.parametrize("tied", [True, False])
def test_an_imported_model_keeps_weights_tying_tokenizer_and_logits(tmp_path: Path, tied: bool) -> None:
    source = write_policy(tmp_path / "source", tied=tied)
    named = import_model(source, tmp_path / "model")
    assert named == weights_sha256(tmp_path / "model") == weights_sha256(source)
    before, after = load_model(source), load_model(tmp_path / "model")
    assert (after.lm_head.weight is after.model.embed_tokens.weight) == tied
    tokens = torch.arange(12).unsqueeze(0)
    assert torch.equal(before(tokens).logits, after(tokens).logits)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "model" / name).read_bytes() == (source / name).read_bytes()


def test_a_model_imported_in_bfloat16_is_stored_so(policy: Path, tmp_path: Path) -> None:
    import_model(policy, tmp_path / "model", "bfloat16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "model" / "model.safetensors").values()} == {torch.bfloat16}


def test_models_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="no such model directory"):
        resolve_model(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="no such bundled model"):
        resolve_model("bundled:absent")
    with pytest.raises(ConfigError, match="cannot fetch the model"):
        resolve_model("nobody/absent-model-of-nobody")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"expected config.json"):
        resolve_model(str(tmp_path / "empty"))


def test_pickled_weights_are_never_loaded(policy: Path) -> None:
    (policy / "model.safetensors").rename(policy / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin \(pickled"):
        resolve_model(str(policy))


def test_a_tokenizer_without_a_chat_template_is_refused(policy: Path) -> None:
    (policy / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        load_tokenizer(policy)


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    source = write_policy(tmp_path / "source", words=VOCABULARY + 1)
    with pytest.raises(ConfigError, match=f"expected ids below {VOCABULARY}"):
        import_model(source, tmp_path / "model")


@pytest.mark.parametrize("content", ['{"a":', "{}", '{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_cannot_be_read_is_one_sentence(policy: Path, content: str) -> None:
    (policy / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="cannot load the model's tokenizer") as caught:
        load_tokenizer(policy)
    assert "\n" not in str(caught.value) and str(policy) in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content"),
    [("chat_template.jinja", "{% for m in messages %}{{ m.content }}"), ("generation_config.json", "{")],
)
def test_a_model_that_could_not_be_prompted_makes_no_checkpoint(
    policy: Path, tmp_path: Path, file: str, content: str
) -> None:
    (policy / file).write_text(content)
    run = RunDirectory.create(tmp_path / "run", small_config(policy))
    with pytest.raises(ConfigError, match="template fails|model's settings"):
        publish_initial_checkpoint(run)
    assert not run.checkpoint_dir(0).exists()


@pytest.mark.parametrize("change", [{"hidden_size": "wide"}, {"model_type": "nosuch"}, {"hidden_act": "nosuch"}])
def test_a_model_configuration_that_cannot_be_used_is_one_sentence(policy: Path, change: dict) -> None:
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ArtifactError, match="cannot load the model") as caught:
        load_model(policy)
    assert "\n" not in str(caught.value) and str(policy) in str(caught.value)


def test_missing_weights_are_an_error_and_not_newly_initialised(policy: Path) -> None:
    tensors = load_file(policy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="newly initialised.*up_proj"):
        load_model(policy)


@pytest.mark.parametrize("damage", ["cut", "header"])
def test_a_damaged_weights_file_is_an_artifact_error(policy: Path, damage: str) -> None:
    path = policy / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-100] if damage == "cut" else b"\xff" * 8 + content[8:])
    with pytest.raises(ArtifactError, match="damaged weights file"):
        weights_sha256(policy)


def test_trained_tensors_must_be_those_of_the_source(policy: Path, tmp_path: Path) -> None:
    tensors = load_file(policy / "model.safetensors")
    with pytest.raises(ArtifactError, match="other tensors"):
        write_weights(policy, tmp_path / "model", {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    with pytest.raises(ArtifactError, match="another shape"):
        write_weights(policy, tmp_path / "model", {**tensors, "model.norm.weight": torch.zeros(0)})


def test_the_initial_checkpoint_is_published_once(policy: Path, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", small_config(policy))
    manifest = publish_initial_checkpoint(run)
    assert manifest.extra["weights_sha256"] == weights_sha256(policy)
    assert read_manifest(run.checkpoint_dir(0)).sha256 == manifest.sha256
    shutil.rmtree(policy)
    assert publish_initial_checkpoint(run).sha256 == manifest.sha256


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 5), st.integers(0, 9))
@settings(deadline=None)
def test_retention_keeps_the_first_the_newest_and_every_nth(steps: set[int], last: int, every: int) -> None:
    removed = set(checkpoints_to_remove(steps, keep_last=last, keep_every=every))
    kept = steps - removed
    assert removed <= steps and removed.isdisjoint(sorted(steps)[-last:]) and 0 not in removed
    assert not every or removed.isdisjoint(range(0, 61, every))
    assert len(kept - {0}) <= last + (60 // every + 1 if every else 0)


def test_retention_removes_directories_and_nothing_else(policy: Path, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", small_config(policy, run__keep_last=1, run__keep_every=2))
    for step in range(4):
        directory = run.checkpoint_dir(step)
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_text(json.dumps({}))
    (run.checkpoint_dir(0).parent / "notes.txt").write_text("mine")
    assert apply_retention(run, 2) == [1]
    assert apply_retention(run, 3) == []
    assert sorted(path.name for path in run.checkpoint_dir(0).parent.iterdir()) == [
        "notes.txt",
        "step=00000",
        "step=00002",
        "step=00003",
    ]
