"""A configuration is loaded in one order, refuses what it does not know, and survives its own TOML."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas import __version__
from schemas.config import ENGINES, ENVIRONMENTS, Config
from schemas.config_loading import (
    all_keys,
    code_version,
    config_from_mapping,
    config_part_sha256,
    differing_keys,
    dump_toml,
    load_config,
    override_config,
    parse_setting,
    preset_names,
)
from schemas.errors import ConfigError

ROOT = Path(__file__).parent.parent


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[rollout]\ngroup_size = 4\ntemperature = 0.5\n[run]\nseed = 3\n")
    config = load_config(None, file, ["rollout.group_size=6", "run.seed=5", "run.seed=7"])
    assert (config.rollout.group_size, config.rollout.temperature, config.run.seed) == (6, 0.5, 7)
    assert config.replay == Config().replay


def test_every_preset_of_the_package_loads() -> None:
    for name in preset_names():
        assert isinstance(load_config(name), Config)


def test_a_preset_is_the_base_of_a_file_and_of_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "small.toml").write_text("[run]\nseed = 1\nsteps = 9\n")
    monkeypatch.setattr("schemas.config_loading.resources.files", lambda package: tmp_path)
    assert preset_names() == ["small"]
    assert load_config("small", None, ["run.steps=4"]).run.model_dump(include={"seed", "steps"}) == {
        "seed": 1,
        "steps": 4,
    }
    with pytest.raises(ConfigError, match="unknown preset.*did you mean small"):
        load_config("smal")


@pytest.mark.parametrize(
    ("setting", "near"),
    [
        ("rollout.group_siz=4", "rollout.group_size"),
        ("rollot.group_size=4", "rollout"),
        ("group_size=4", "rollout.group_size"),
        ("replay.group_size=4", "rollout.group_size"),
        ("objective.opsd_coeff=0", "objective.opsd_coef"),
        ("optimizer.learning=1", None),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(setting: str, near: str | None) -> None:
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_config(None, None, [setting])
    assert caught.value.exit_code == 2
    assert setting.partition("=")[0].split(".")[0] in str(caught.value.where)
    if near:
        assert caught.value.remedy == f"did you mean {near}?"


IMPOSSIBLE = [
    ("rollout.group_size", "1", ">= 2"),
    ("rollout.group_size", "'8'", "an integer"),
    ("rollout.group_size", "8.0", "an integer"),
    ("rollout.group_size", "true", "an integer"),
    ("rollout.temperature", "0", "> 0"),
    ("rollout.temperature", "-1", "> 0"),
    ("rollout.temperature", "inf", "a finite number"),
    ("rollout.temperature", "warm", "a number"),
    ("replay.replays", "0", ">= 1"),
    ("replay.skill_temperature", "0", "> 0"),
    ("prompt.history", "-1", ">= 0"),
    ("prompt.mode", "windows", "'window' or 'append_only'"),
    ("gains.decay", "1", "< 1"),
    ("objective.eps_clip", "0", "> 0"),
    ("optimizer.lr", "nan", "a finite number"),
    ("optimizer.lr", "[1e-6]", "a number"),
    ("learner.gradient_checkpointing", "1", "true or false"),
    ("learner.minibatch_rows", "0", ">= 1"),
    ("env.options", "3", "a table"),
    ("rollout", "3", "a table"),
    ("version", "2", "1"),
    ("run.seed.x", "1", "an integer"),
]


@pytest.mark.parametrize(("key", "value", "expected"), IMPOSSIBLE)
def test_wrong_types_and_impossible_numbers_name_key_bound_value_and_source(
    key: str, value: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, None, [f"{key}={value}"])
    error = caught.value
    assert expected in str(error.expected)
    assert error.found is not None
    assert f"--set {key}={value}" in str(error.where)
    assert "\n" not in str(error) and error.exit_code == 2


@pytest.mark.parametrize(
    ("setting", "near"),
    [
        ("objective.opsd_weight=trsut", "trust"),
        ("objective.opsd_weight=mine:Weight", None),
        ("objective.opsd_gate=sigmoit", "sigmoid"),
        ("objective.opsd_gate=gated", None),
        ("objective.opsd_gate=my pkg:Class", None),
        ("objective.opsd_gate=pkg.mod:", None),
        ("objective.advantage=gpro", "grpo"),
        ("env.name=houshold", "household"),
        ("engine.name=vlm", "vllm"),
        ("optimizer.schedule=cosin", "cosine"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest_one(setting: str, near: str | None) -> None:
    with pytest.raises(ConfigError, match="value not allowed") as caught:
        load_config(None, None, [setting])
    assert caught.value.exit_code == 2 and caught.value.remedy == (near and f"did you mean {near}?")
    assert f"--set {setting}" in str(caught.value.where)


def test_the_names_of_environments_and_engines_are_those_of_the_package() -> None:
    from data.environments import BUILTIN as worlds
    from stages.engines import BUILTIN as engines

    assert (tuple(sorted(worlds)), tuple(sorted(engines))) == (ENVIRONMENTS, ENGINES)


def test_a_fault_names_the_source_that_wrote_the_key_itself() -> None:
    with pytest.raises(ConfigError, match="rollout, from --set rollout=3"):
        load_config("household-tiny", None, ["rollout=3"])


def test_parts_of_the_objective_may_be_import_strings() -> None:
    sets = ["objective.opsd_gate=a.b:C", "objective.advantage=mine:Credit", "objective.advantage_options.mix=0.5"]
    objective = load_config(None, None, sets).objective
    assert (objective.opsd_gate, objective.advantage) == ("a.b:C", "mine:Credit")
    assert objective.advantage_options == {"mix": 0.5}


def test_every_key_is_described_and_what_the_method_needs_says_where_its_default_comes_from() -> None:
    for name, field in Config.model_fields.items():
        section = field.annotation
        for key, inner in getattr(section, "model_fields", {}).items():
            assert inner.description and inner.description.strip("[]PSO 0-9%"), f"{name}.{key}"
            if name in ("gains", "objective", "optimizer", "sft", "replay") and key != "advantage_options":
                assert any(mark in inner.description for mark in ("[P]", "[S]", "[O]")), f"{name}.{key}"


def test_arithmetic_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="beta_gate is the slope of the sigmoid gate"):
        load_config(None, None, ["objective.opsd_gate=constant", "objective.beta_gate=3"])
    with pytest.raises(ConfigError, match="max_episode_tokens must exceed"):
        load_config(None, None, ["prompt.mode=append_only", "prompt.max_episode_tokens=512"])
    with pytest.raises(ConfigError, match="warmup_steps must be below"):
        load_config(None, None, ["optimizer.schedule=cosine", "optimizer.warmup_steps=150"])


def test_a_fault_in_a_file_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("# comment\n[rollout]\n\ngroup_size = 1\n")
    with pytest.raises(ConfigError, match=r"my\.toml:4"):
        load_config(None, file)


@pytest.mark.parametrize("content", [b"[run\n", b"a = 1\na = 2\n", b"\xff\xfe\x00"])
def test_a_malformed_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "my.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(None, file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the configuration file"):
            load_config(None, path)


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("run.seed=3", ("run", "seed"), 3),
        ("optimizer.lr=1e-5", ("optimizer", "lr"), 1e-5),
        ("model.path=bundled:x", ("model", "path"), "bundled:x"),
        ("model.path = 'a b'", ("model", "path"), "a b"),
        ("model.path=7", ("model", "path"), "7"),
        ("model.revision=1234567", ("model", "revision"), "1234567"),
        ("model.revision=none", ("model", "revision"), None),
        ("learner.minibatch_rows=none", ("learner", "minibatch_rows"), None),
        ("learner.minibatch_rows=8", ("learner", "minibatch_rows"), 8),
        ("env.options.size=small", ("env", "options", "size"), "small"),
        ("env.options={a = 1}", ("env", "options"), {"a": 1}),
        ("tasks.train=generated:size=small,count=3", ("tasks", "train"), "generated:size=small,count=3"),
        ("run.seed=1\nother = 2", ("run", "seed"), "1\nother = 2"),
    ],
)
def test_settings_are_toml_values_or_bare_text(setting: str, path: tuple[str, ...], value: Any) -> None:
    assert parse_setting(setting) == (path, value)


@pytest.mark.parametrize("setting", ["run.seed", "=3", "run..seed=3", ".=1", ""])
def test_what_is_no_setting_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="section.key=value"):
        parse_setting(setting)


_leaf = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_options = st.dictionaries(st.text(min_size=1), st.recursive(_leaf, st.lists, max_leaves=4), max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**62),
    path=st.text(),
    options=_options,
    lr=st.floats(1e-300, 1e300),
    rows=st.none() | st.integers(1, 10**9),
    mode=st.sampled_from(["window", "append_only"]),
    revision=st.none() | st.text(),
)
def test_a_configuration_survives_its_own_toml_bit_for_bit(
    seed: int, path: str, options: dict[str, Any], lr: float, rows: int | None, mode: str, revision: str | None
) -> None:
    data = {
        "run": {"seed": seed},
        "model": {"path": path, "revision": revision},
        "env": {"options": options},
        "optimizer": {"lr": lr},
        "learner": {"minibatch_rows": rows},
        "prompt": {"mode": mode},
    }
    config = config_from_mapping(data)
    text = dump_toml(config)
    again = config_from_mapping(tomllib.loads(text))
    assert again == config
    assert dump_toml(again) == text


def test_the_resolved_toml_names_every_key_that_has_a_value() -> None:
    parsed = tomllib.loads(dump_toml(Config()))
    unset = {"model.revision", "learner.minibatch_rows"}
    for key in set(all_keys()) - unset:
        section, _, name = key.partition(".")
        assert name in parsed[section] if name else section in parsed


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Config().run.seed = 3  # type: ignore[misc]


def test_overriding_keeps_everything_else() -> None:
    base = load_config(None, None, ["run.seed=9", "env.options.size=small", "learner.minibatch_rows=4"])
    assert override_config(base, []) == base
    changed = override_config(base, ["learner.minibatch_rows=none", "env.options.drop=true"])
    assert differing_keys(base, changed) == [
        "env.options ({'size': 'small'}, {'size': 'small', 'drop': True})",
        "learner.minibatch_rows (4, None)",
    ]


def test_the_hash_of_a_part_depends_on_that_part_alone() -> None:
    base = Config()
    other = load_config(None, None, ["run.steps=3", "optimizer.lr=1"])
    assert config_part_sha256(base, "rollout", "run.seed") == config_part_sha256(other, "rollout", "run.seed")
    assert config_part_sha256(base, "run") != config_part_sha256(other, "run")
    assert config_part_sha256(base, "rollout") != config_part_sha256(base, "rollout", "run.seed")
    with pytest.raises(ConfigError, match="no such key"):
        config_part_sha256(base, "rollout.group")


def test_the_code_version_is_the_same_in_every_process_and_changes_with_the_code(tmp_path: Path) -> None:
    program = "from schemas.config_loading import code_version; print(code_version())"
    for package in ("schemas", "stages", "data", "rsipo_cli"):
        (tmp_path / package).mkdir()
        for path in (ROOT / package).rglob("*.py"):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())

    def version(hash_seed: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    first = version("1")
    assert first == version("2")
    assert first.startswith(f"{__version__}+")
    with open(tmp_path / "stages" / "stage.py", "a") as file:
        file.write("# changed\n")
    assert version("1") != first
    assert code_version() == code_version()


def test_another_environment_starts_from_no_options_and_keeps_those_that_come_with_its_name(tmp_path: Path) -> None:
    assert load_config("household-tiny", None, []).env.options == {"prompts": "compact"}
    changed = load_config("household-tiny", None, ["env.name=my.world:World"])
    assert changed.env.options == {}
    both = load_config("household-tiny", None, ["env.options.size=3", "env.name=my.world:World"])
    assert both.env.options == {"size": 3}
    same = load_config("household-tiny", None, ["env.name=household", "env.options.driver=stock"])
    assert same.env.options == {"prompts": "compact", "driver": "stock"}
    file = tmp_path / "own.toml"
    file.write_text('[env]\nname = "my.world:World"\n[env.options]\nlevel = 2\n')
    assert load_config("household-tiny", file, ["env.options.size=3"]).env.options == {"level": 2, "size": 3}
    assert override_config(both, ["env.name=household"]).env.options == {}
