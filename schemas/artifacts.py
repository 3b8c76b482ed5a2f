"""Published directories: what a manifest says, how a directory appears all at once, and how it is checked.

An artefact is a directory with a `manifest.json` that names its kind, the sha256 of every input and the sha256 and size of
every file. It is written in a hidden sibling `.tmp-<name>-<pid>`, flushed to the disk, and renamed: a process killed at any
moment leaves either the whole artefact or a hidden leftover that the next start removes. Nothing here knows what the files
mean.

Failures of the disk: a full disk (ENOSPC, EDQUOT) is an RsipoError, exit code 1, because the same command continues once
there is room; a directory that cannot be read or written (EROFS, EACCES, EPERM, ...) is an ArtifactError, exit code 3.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from schemas.errors import ArtifactError, RsipoError

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
TEMPORARY_PREFIX = ".tmp-"

_LEFTOVER = re.compile(r"\.tmp-(?P<name>.+)-(?P<pid>\d+)\Z", re.DOTALL)
_FULL = {errno.ENOSPC, errno.EDQUOT}
_CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM}


def sha256_file(path: Path | str) -> str:
    """Hex sha256 of a file's bytes, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(obj: object) -> str:
    """Hex sha256 of the canonical JSON of `obj`: sorted keys, no spaces, UTF-8, no NaN.

    >>> sha256_json({"b": 1, "a": [2.0]}) == sha256_json({"a": [2.0], "b": 1})
    True
    """
    return hashlib.sha256(_canonical(obj).encode()).hexdigest()


def _canonical(obj: object) -> str:
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of an artefact."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """What an artefact is, what it was made from and which files it consists of.

    `inputs` maps the name of an input to its sha256 (or another string that changes with it); `files` maps POSIX paths
    relative to the artefact to their entries; `extra` holds JSON facts about the result.
    """

    kind: str
    inputs: dict[str, str]
    files: dict[str, FileEntry]
    extra: dict[str, Any] = field(default_factory=dict)
    version: int = MANIFEST_VERSION

    def to_bytes(self) -> bytes:
        """The content of `manifest.json`: a function of the fields alone, with a checksum of itself."""
        content: dict[str, Any] = {
            "kind": self.kind,
            "version": self.version,
            "inputs": self.inputs,
            "files": {name: {"sha256": entry.sha256, "bytes": entry.bytes} for name, entry in self.files.items()},
            "extra": self.extra,
        }
        content["checksum"] = sha256_json(content)
        return (json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()

    @cached_property
    def sha256(self) -> str:
        """Hex sha256 of the bytes of `manifest.json`."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, content: bytes, where: Path, remedy: str | None = None) -> Manifest:
        """Parse `manifest.json`. Raises ArtifactError for anything but what `to_bytes` writes."""
        try:
            parsed = json.loads(content)
            version = parsed["version"]
            if version != MANIFEST_VERSION:
                raise ArtifactError(
                    "the artefact was written by another version",
                    where=str(where),
                    expected=f"manifest version {MANIFEST_VERSION}",
                    found=version,
                    remedy=remedy or "use the release that wrote it, or start a new run directory",
                )
            files = {name: FileEntry(entry["sha256"], entry["bytes"]) for name, entry in parsed["files"].items()}
            manifest = cls(parsed["kind"], parsed["inputs"], files, parsed["extra"], version)
            intact = manifest.to_bytes() == content and all(_is_inside(name) for name in files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(where, repr(error), remedy) from error
        if not intact:
            raise _damaged(where, "content that does not match its checksum", remedy)
        return manifest


def _damaged(where: Path, found: str, remedy: str | None) -> ArtifactError:
    return ArtifactError(
        "the manifest is damaged", where=str(where), found=found, remedy=remedy or "rebuild the artefact"
    )


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts


@contextmanager
def file_errors(path: Path | str) -> Iterator[None]:
    """Turn failures of the file system inside the block into errors a user can read (see the module's docstring)."""
    try:
        yield
    except RsipoError:
        raise
    except Exception as error:
        full = getattr(error, "errno", None) in _FULL or "No space left on device" in str(error)
        if full:
            raise RsipoError(
                "the disk is full",
                where=str(path),
                remedy="free some space and run the same command again; what was published stays valid",
            ) from error
        if not isinstance(error, OSError):
            raise
        closed = error.errno in _CLOSED
        raise ArtifactError(
            "it cannot be read or written" if closed else "a file operation failed",
            where=str(path),
            found=error.strerror or str(error),
            remedy="check its permissions, or choose another place" if closed else "check the path and the disk",
        ) from error


def fsync_path(path: Path | str) -> None:
    """Flush one file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory and its parents, and flush every parent that gained an entry."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    fsync_path(path.parent)


def temporary_sibling(target: Path) -> Path:
    """The hidden path in which this process prepares `target`."""
    return target.parent / f"{TEMPORARY_PREFIX}{target.name}-{os.getpid()}"


def write_file(target: Path, content: bytes) -> None:
    """Write a file so that it has its old content or the new one, never a part; flushed when it returns."""
    with file_errors(target):
        make_directory(target.parent)
        temporary = temporary_sibling(target)
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_path(target.parent)


def remove_leftovers(directory: Path, name: str | None = None, *, everything: bool = False) -> list[Path]:
    """Remove hidden temporary entries of `directory` whose process is gone; returns what was removed, sorted.

    `name` restricts it to one target; `everything` also takes those of living processes, which is right only under a lock
    that keeps other writers out.
    """
    removed = []
    for entry in sorted(directory.iterdir()) if directory.is_dir() else []:
        match = _LEFTOVER.match(entry.name)
        if match is None or (name is not None and match["name"] != name):
            continue
        if everything or not _is_another_live_process(int(match["pid"])):
            _remove(entry)
            removed.append(entry)
    return removed


def _is_another_live_process(pid: int) -> bool:
    # In containers a restarted process often has the same id as the one that was killed.
    if pid == os.getpid() or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def publish_directory(
    target: Path,
    *,
    kind: str,
    inputs: dict[str, str],
    write: Callable[[Path], None],
    extra: dict[str, Any] | None = None,
    replace: bool = False,
) -> Manifest:
    """Let `write` fill a directory and publish it as `target`, all or nothing; returns its manifest.

    `write` receives an empty hidden directory on the same file system. An existing `target` is refused, or with `replace`
    taken away in the moment before the new one appears (a kill in between leaves none, never a mixture). Raises
    ArtifactError (exit code 3) for an existing target or a closed directory, RsipoError (exit code 1) for a full disk, and
    whatever `write` raises; after a failure nothing is left behind.
    """
    with file_errors(target):
        if target.exists() and not replace:
            raise ArtifactError("the artefact exists already", where=str(target), remedy="remove it, or pass --force")
        make_directory(target.parent)
        remove_leftovers(target.parent, target.name)
        temporary = temporary_sibling(target)
        try:
            temporary.mkdir()
            write(temporary)
            manifest = Manifest(kind, dict(inputs), hash_files(temporary), dict(extra or {}))
            _flush_tree(temporary)
            write_file(temporary / MANIFEST, manifest.to_bytes())
            if target.exists():
                # The old manifest goes first: a half-removed artefact must not look complete.
                (target / MANIFEST).unlink(missing_ok=True)
                _remove(target)
            os.rename(temporary, target)
        except BaseException:
            _remove(temporary)
            raise
        fsync_path(target.parent)
        return manifest


def hash_files(directory: Path) -> dict[str, FileEntry]:
    """Entries of every file below `directory` except hidden temporaries and the manifest, by POSIX path, sorted."""
    files = {}
    for path in sorted(directory.rglob("*"), key=lambda path: path.relative_to(directory).as_posix()):
        name = path.relative_to(directory).as_posix()
        if path.is_dir() or name == MANIFEST or path.name.startswith(TEMPORARY_PREFIX):
            continue
        if path.is_symlink() or not path.is_file():
            raise ArtifactError("an artefact may hold plain files only", where=str(path))
        files[name] = FileEntry(sha256_file(path), path.stat().st_size)
    return files


def _flush_tree(directory: Path) -> None:
    for folder, _, names in os.walk(directory):
        for name in names:
            fsync_path(os.path.join(folder, name))
        fsync_path(folder)


def read_manifest(target: Path, *, verify: bool = True, remedy: str | None = None) -> Manifest:
    """The manifest of a published artefact, after checking that its files are the ones it names.

    `verify=False` compares presence and sizes, `verify=True` also the hashes, which reads every byte. Raises ArtifactError
    for an artefact that is missing, unfinished, damaged or of another version, and for a file it does not name.
    """
    remedy = remedy or "rebuild it with --force"
    path = target / MANIFEST
    with file_errors(target):
        if not path.is_file():
            what = "the artefact is unfinished" if target.is_dir() else "the artefact is missing"
            raise ArtifactError(what, where=str(target), expected=MANIFEST, found="none", remedy=remedy)
        manifest = Manifest.from_bytes(path.read_bytes(), path, remedy)
        for name, entry in manifest.files.items():
            _check_file(target / name, entry, verify, remedy)
        present = {found.relative_to(target).as_posix() for found in target.rglob("*") if not found.is_dir()}
        stray = sorted(
            name
            for name in present - set(manifest.files) - {MANIFEST}
            if not PurePosixPath(name).name.startswith(TEMPORARY_PREFIX)
        )
        if stray:
            raise ArtifactError("a file does not belong to the artefact", where=str(target / stray[0]), remedy=remedy)
    return manifest


def _check_file(path: Path, entry: FileEntry, verify: bool, remedy: str) -> None:
    if not path.is_file():
        raise ArtifactError("a file of the artefact is missing", where=str(path), remedy=remedy)
    size = path.stat().st_size
    if size != entry.bytes:
        raise ArtifactError(
            "a file is damaged", where=str(path), expected=f"{entry.bytes} bytes", found=f"{size} bytes", remedy=remedy
        )
    if verify and (found := sha256_file(path)) != entry.sha256:
        raise ArtifactError(
            "a file is damaged",
            where=str(path),
            expected=f"sha256 {entry.sha256[:12]}",
            found=f"sha256 {found[:12]}",
            remedy=remedy,
        )


@dataclass(frozen=True, slots=True)
class Status:
    """Whether an artefact is there and up to date; `changed` names the inputs that differ, with old and new hash."""

    state: Literal["absent", "complete", "stale"]
    changed: list[str] = field(default_factory=list)


def status(target: Path, inputs: Mapping[str, str]) -> Status:
    """Compare an artefact with the inputs it would be made from now; sizes are checked, hashes are not.

    Raises ArtifactError for an artefact that is published and damaged.
    """
    if not (target / MANIFEST).is_file():
        return Status("absent")
    old = read_manifest(target, verify=False).inputs
    changed = [
        f"{name} (was {_shown(old.get(name))}, is {_shown(inputs.get(name))})"
        for name in sorted({*old, *inputs})
        if old.get(name) != inputs.get(name)
    ]
    return Status("stale", changed) if changed else Status("complete")


def _shown(value: str | None) -> str:
    """An input in a message: hashes in short, names and versions whole."""
    if value is None:
        return "none"
    return value[:12] if re.fullmatch(r"[0-9a-f]{64}", value) else value
