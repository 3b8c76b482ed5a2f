"""From preset, file and `--set` to a Config, and back to TOML; hashes of parts of it and of the code.

Later sources win: defaults, preset, file, `--set` in the order given. Every message names the key, what was expected, what
was found and where it came from.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from schemas import __version__
from schemas.artifacts import sha256_json
from schemas.config import UNKNOWN_NAME, Config
from schemas.errors import ConfigError

PACKAGES = ("data", "rsipo_cli", "schemas", "stages")
# What computes: sources, and the wording of prompts kept beside them.
_CODE_SUFFIXES = {".py", ".jinja", ".txt"}

Origins = dict[tuple[str, ...], str]
Options = TypeVar("Options", bound=BaseModel)


def load_config(preset: str | None = None, file: Path | None = None, sets: Sequence[str] = ()) -> Config:
    """The configuration from a preset of the package, a TOML file and `key=value` settings; all are optional.

    Raises ConfigError for an unknown preset, an unreadable file, an unknown key (with the nearest one), a wrong type, a
    value out of range or arithmetic that cannot work.
    """
    data: dict[str, Any] = {}
    origins: Origins = {}
    if preset is not None:
        _merge(data, origins, _preset_toml(preset), f"preset {preset}")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("cannot read the configuration file", where=str(file), found=_reason(error)) from error
        _merge(data, origins, text, str(file))
    return _with_settings(data, origins, sets)


def override_config(config: Config, sets: Sequence[str]) -> Config:
    """`config` with `key=value` settings applied. Raises ConfigError as `load_config` does."""
    return _with_settings(config.model_dump(), {}, sets)


def _with_settings(data: dict[str, Any], origins: Origins, sets: Sequence[str]) -> Config:
    parsed = [(setting, *parse_setting(setting)) for setting in sets]
    _start_options_anew(data, origins, [(path, value) for _, path, value in parsed])
    for setting, path, value in parsed:
        _put(data, path, value)
        origins[path] = f"--set {setting}"
    return config_from_mapping(data, origins)


def preset_names() -> list[str]:
    """Names of the presets in the package, sorted."""
    folder = resources.files("data") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _preset_toml(name: str) -> str:
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        raise ConfigError(
            "unknown preset",
            where="--preset",
            expected=f"one of {', '.join(names)}",
            found=repr(name),
            remedy=f"did you mean {near[0]}?" if near else None,
        )
    return (resources.files("data") / "presets" / f"{name}.toml").read_text(encoding="utf-8")


def _merge(data: dict[str, Any], origins: Origins, text: str, source: str) -> None:
    try:
        parsed = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("not valid TOML", where=source, found=str(error), remedy="correct the file") from error
    lines = _key_lines(text)
    leaves = _leaves(parsed)
    _start_options_anew(data, origins, leaves)
    for path, value in leaves:
        _put(data, path, value)
        origins[path] = f"{source}:{lines[path]}" if path in lines else source


def _start_options_anew(data: dict[str, Any], origins: Origins, leaves: Sequence[tuple[tuple[str, ...], Any]]) -> None:
    """Forget options of an earlier source for an environment or engine that `leaves` replace: they belonged to that one."""
    for section in ("env", "engine"):
        earlier = data.get(section)
        names = [value for path, value in leaves if path == (section, "name")]
        if not names or not isinstance(earlier, dict) or "options" not in earlier:
            continue
        if names[-1] != earlier.get("name", Config.model_fields[section].annotation().name):  # type: ignore[misc]
            del earlier["options"]
            for path in [path for path in origins if path[:2] == (section, "options")]:
                del origins[path]


def _leaves(table: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = []
    for key, value in table.items():
        if isinstance(value, dict) and value:
            found.extend(_leaves(value, (*prefix, key)))
        else:
            found.append(((*prefix, key), value))
    return found


def _put(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        inner = data.get(key)
        if not isinstance(inner, dict):
            inner = data[key] = {}
        data = inner
    data[path[-1]] = value


def _key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Line numbers of plainly written keys; exotic TOML (quoted keys, multi-line strings) only loses its number."""
    lines: dict[tuple[str, ...], int] = {}
    section: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([A-Za-z0-9_.\- ]+?)\s*\]\s*(#.*)?$", line):
            section = tuple(part.strip() for part in header[1].split("."))
        elif key := re.match(r"\s*([A-Za-z0-9_.\-]+)\s*=", line):
            lines.setdefault((*section, *key[1].split(".")), number)
    return lines


def parse_setting(setting: str) -> tuple[tuple[str, ...], Any]:
    """Split one `--set` argument into the key's path and its value: a TOML value, else the bare text.

    A key whose type is text takes the text as written; a key that may be unset takes `none`.

    >>> parse_setting("rollout.group_size=4")
    (('rollout', 'group_size'), 4)
    >>> parse_setting("model.path=models/7")
    (('model', 'path'), 'models/7')
    """
    key, equals, text = setting.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError("not a setting", where="--set", expected="section.key=value", found=repr(setting))
    text = text.strip()
    kinds = _field_types(path)
    if type(None) in kinds and text.lower() in {"none", "null"}:
        return path, None
    value = _toml_value(text)
    if str in kinds and not isinstance(value, str):
        value = text
    return path, value


def _toml_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _field_types(path: tuple[str, ...]) -> tuple[Any, ...]:
    """The types a key accepts, () for an unknown one."""
    model: Any = Config
    for position, key in enumerate(path):
        if not (isinstance(model, type) and issubclass(model, BaseModel)) or key not in model.model_fields:
            return ()
        annotation = model.model_fields[key].annotation
        if position == len(path) - 1:
            is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
            return typing.get_args(annotation) if is_union else (annotation,)
        model = annotation
    return ()


def config_from_mapping(data: Mapping[str, Any], origins: Origins | None = None) -> Config:
    """Validate nested tables. `origins` says where each key was written. Raises ConfigError for the first fault."""
    try:
        # Strict: "8" is not a number and true is not 1; an integer is accepted where a float is expected.
        return Config.model_validate(dict(data), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _config_error(dict(first), origins or {}) from error


def options_from_mapping(model: type[Options], data: Mapping[str, Any], prefix: str) -> Options:
    """Validate the options of a plug-in, which stand below the key `prefix`. Raises ConfigError for the first fault."""
    try:
        return model.model_validate(dict(data), strict=True)
    except ValidationError as error:
        first = dict(error.errors(include_url=False)[0])
        first["loc"] = (*prefix.split("."), *first["loc"])
        raise _config_error(first, {}, tuple(f"{prefix}.{key}" for key in keys_of(model))) from error


_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_TYPES = {"int": "an integer", "float": "a number", "string": "text", "bool": "true or false", "dict": "a table"}


def _config_error(fault: dict[str, Any], origins: Origins, known: Sequence[str] | None = None) -> ConfigError:
    """The fault of a validation in words; `known` are the keys that there are (default: those of Config)."""
    path = tuple(str(part) for part in fault["loc"])
    key = ".".join(path)
    below = (source for written, source in origins.items() if written[: len(path)] == path)
    origin = origins.get(path) or next(below, None)
    where = f"{key}, from {origin}" if key and origin else key or origin
    if fault["type"] == "extra_forbidden":
        near = _nearest_key(path, all_keys() if known is None else known)
        return ConfigError("unknown key", where=where, remedy=f"did you mean {near}?" if near else None)
    if fault["type"] == "missing":
        return ConfigError("a key is missing", where=where, remedy="set it")
    if fault["type"] == "value_error":
        return ConfigError(str(fault["ctx"]["error"]), where=where)
    context = fault.get("ctx", {})
    bounds = [f"{sign} {context[name]}" for name, sign in _BOUNDS.items() if name in context]
    if bounds:
        return ConfigError("value out of range", where=where, expected=bounds[0], found=repr(fault["input"]))
    if fault["type"] == "literal_error":
        names = re.findall(r"'([^']*)'", context["expected"])
        return _not_allowed(where, context["expected"], names, fault["input"])
    if fault["type"] == UNKNOWN_NAME:
        expected = ", ".join(map(repr, context["names"])) + " or an import string package.module:Class"
        return _not_allowed(where, expected, context["names"], fault["input"])
    if fault["type"] == "string_too_short":
        return ConfigError(
            "value not allowed", where=where, expected="text that is not empty", found=repr(fault["input"])
        )
    if fault["type"] == "finite_number":
        return ConfigError("value out of range", where=where, expected="a finite number", found=repr(fault["input"]))
    expected = _TYPES.get(fault["type"].removesuffix("_type"), "a table of keys")
    return ConfigError("wrong type", where=where, expected=expected, found=_described(fault["input"]))


def _not_allowed(where: str | None, expected: str, names: Sequence[str], found: object) -> ConfigError:
    near = difflib.get_close_matches(str(found), names, n=1)
    remedy = f"did you mean {near[0]}?" if near else None
    return ConfigError("value not allowed", where=where, expected=expected, found=repr(found), remedy=remedy)


def _described(value: object) -> str:
    names = {bool: "true/false", int: "integer", float: "number", str: "text", dict: "table", list: "list"}
    return f"{names.get(type(value), type(value).__name__)} {value!r}"[:120]


def _nearest_key(path: tuple[str, ...], known: Sequence[str]) -> str | None:
    """The known key closest to an unknown one: in the same section first, then by its last part anywhere."""
    parent = ".".join(path[:-1])
    siblings = sorted(
        {name.split(".")[len(path) - 1] for name in known if name.startswith(f"{parent}." if parent else "")}
    )
    near = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.6)
    if near:
        return f"{parent}.{near[0]}" if parent else near[0]
    for name in known:
        if name.rpartition(".")[2] == path[-1]:
            return name
    last_parts = {name.rpartition(".")[2]: name for name in known}
    near = difflib.get_close_matches(path[-1], sorted(last_parts), n=1, cutoff=0.5)
    return last_parts[near[0]] if near else None


@cache
def all_keys() -> tuple[str, ...]:
    """Every dotted key of the configuration, in the order of its definition."""
    return tuple(keys_of(Config))


def keys_of(model: type[BaseModel]) -> list[str]:
    """The dotted keys of a model and of the models in it, in the order of their definition."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *typing.get_args(field.annotation))
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        keys += [name] if inner is None else [f"{name}.{key}" for key in keys_of(inner)]
    return keys


def dump_toml(config: Config) -> str:
    """The resolved configuration as TOML, every key with its value; unset ones are left out. Loads back to an equal Config."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def differing_keys(left: Config, right: Config) -> list[str]:
    """Dotted keys whose values differ, in the order of their definition, as `key (left, right)`."""
    found = []
    for key in all_keys():
        ours, theirs = _value_at(left, key), _value_at(right, key)
        if ours != theirs:
            found.append(f"{key} ({ours!r}, {theirs!r})")
    return found


def config_part_sha256(config: Config, *parts: str) -> str:
    """Hash of some sections or dotted keys: what an artefact depends on, and nothing else of the configuration.

    >>> changed = Config().model_copy(update={"run": Config().run.model_copy(update={"steps": 7})})
    >>> config_part_sha256(Config(), "rollout", "run.seed") == config_part_sha256(changed, "rollout", "run.seed")
    True
    """
    return sha256_json({part: _value_at(config, part) for part in parts})


def _value_at(config: Config, key: str) -> Any:
    value: Any = config.model_dump(mode="json")
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ConfigError("no such key of the configuration", where=key)
        value = value[part]
    return value


@cache
def code_version() -> str:
    """`<package version>+<hash>` over the sources of the four packages: the same wherever the same code is installed."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in spec.submodule_search_locations or () if spec else ():
            folder = Path(root)
            files = [path for path in folder.rglob("*") if path.suffix in _CODE_SUFFIXES and path.is_file()]
            for path in sorted(files, key=lambda path: path.relative_to(folder).as_posix()):
                digest.update(f"{package}/{path.relative_to(folder).as_posix()}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{__version__}+{digest.hexdigest()[:12]}"


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "text that is not UTF-8"
