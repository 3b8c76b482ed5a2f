"""A run directory: where everything of a run lies, its resolved configuration, and the lock that keeps a second writer out.

Layout: `config.toml`, `logs/`, `panels/`, `checkpoints/step=00001/` and one folder per table, `<table>/step=00001/`.
Readers never lock. Paths are made absolute here, once.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from schemas.artifacts import MANIFEST, file_errors, make_directory, remove_leftovers, write_file
from schemas.config import CONFIG_VERSION, Config
from schemas.config_loading import config_from_mapping, differing_keys, dump_toml
from schemas.errors import ArtifactError, ConfigError, LockError, RsipoError

CONFIG_FILE = "config.toml"
LOCK_FILE = ".lock"
PANELS = "panels"

# Locks this process holds, by absolute root: the loop locks a run and calls stages that lock it again.
_HELD: dict[Path, int] = {}


@dataclass(frozen=True)
class RunDirectory:
    """One run on disk. Make it with `create` or `open`."""

    root: Path
    config: Config
    stored: bytes | None = field(default=None, repr=False, compare=False)  # config.toml when this handle was made

    @classmethod
    def create(cls, root: Path | str, config: Config) -> RunDirectory:
        """Start a run directory, or take up one that was started with an equal configuration.

        One that holds nothing that was played or trained, nor a checkpoint, takes another configuration: what failed at its
        beginning, a wrong option or a model that is not there, must be correctable by the same command. Raises ConfigError when it holds another configuration, ArtifactError when it is of another version or damaged,
        when `root` is a file or when it cannot be written, LockError when another process starts it at this moment.
        """
        root = _absolute(root)
        if not (root / CONFIG_FILE).exists():
            if root.exists() and not root.is_dir():
                raise ArtifactError(
                    "the run directory is not a directory", where=str(root), remedy="choose another --run"
                )
            with file_errors(root):
                make_directory(root)
            with cls(root, config).lock():
                # Asked again under the lock: of two first starts, only one may find its configuration on disk.
                if not (root / CONFIG_FILE).exists():
                    return cls._written(root, config)
        run = cls.open(root)
        if run.config != config and run.is_empty():
            with run.lock():
                if run.is_empty():
                    shutil.rmtree(root / PANELS, ignore_errors=True)  # of the other configuration
                    return cls._written(root, config)
        if differing := differing_keys(run.config, config):
            shown = ", ".join(differing[:3]) + (f" and {len(differing) - 3} more" if len(differing) > 3 else "")
            raise ConfigError(
                "the run directory was started with another configuration",
                where=str(root),
                expected="equal values (stored, given)",
                found=shown,
                remedy="leave the options out to continue it, or choose another --run",
            )
        return run

    def is_empty(self) -> bool:
        """Whether the run has made nothing yet but panels, which can be made again: no table, no checkpoint."""
        own = {CONFIG_FILE, LOCK_FILE, PANELS, self.log_path.parent.name}
        return not any(entry.name not in own for entry in self.root.iterdir())

    @classmethod
    def open(cls, root: Path | str) -> RunDirectory:
        """An existing run directory. Raises ArtifactError when it is missing, damaged or of another version."""
        root = _absolute(root)
        config, content = _stored_config(root)
        return cls(root, config, content)

    @classmethod
    def _written(cls, root: Path, config: Config) -> RunDirectory:
        content = dump_toml(config).encode()
        write_file(root / CONFIG_FILE, content)
        return cls(root, config, content)

    @staticmethod
    def exists(root: Path | str) -> bool:
        """Whether a run was started at `root`."""
        return (_absolute(root) / CONFIG_FILE).exists()

    def step_dir(self, table: str, step: int) -> Path:
        """`RUN/<table>/step=00001`."""
        return self.root / table / f"step={step:05d}"

    def checkpoint_dir(self, step: int) -> Path:
        """`RUN/checkpoints/step=00001`; step 0 is the policy before the first update."""
        return self.step_dir("checkpoints", step)

    def panel_path(self, name: str) -> Path:
        """`RUN/panels/<name>.jsonl.xz`."""
        return self.root / PANELS / f"{name}.jsonl.xz"

    @property
    def log_path(self) -> Path:
        """`RUN/logs/rsipo.log`, to which tracebacks go."""
        return self.root / "logs" / "rsipo.log"

    def finished_steps(self, table: str) -> list[int]:
        """Steps of a table (or of `checkpoints`) that were published, ascending."""
        folder = self.root / table
        found = []
        for entry in folder.iterdir() if folder.is_dir() else ():
            match = re.fullmatch(r"step=(\d+)", entry.name)
            if match and (entry / MANIFEST).is_file():
                found.append(int(match[1]))
        return sorted(found)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for writing; what killed writers left behind is removed first. Re-entrant within a process.

        Raises LockError naming the holder when another process has it, ConfigError when another process has meanwhile
        started the run with another configuration. The lock belongs to the open file: it ends with
        the process, however that ends.
        """
        if self.root in _HELD:
            _HELD[self.root] += 1
            try:
                yield
            finally:
                _HELD[self.root] -= 1
            return
        with file_errors(self.root):
            descriptor = os.open(self.root / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(descriptor)
            _HELD[self.root] = 1
            try:
                self._check_unchanged()
                self.remove_leftovers()
                yield
            finally:
                del _HELD[self.root]
                os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise LockError(
                "another process writes this run directory",
                where=str(self.root),
                found=holder,
                remedy="wait until it has ended, or choose another --run",
            ) from error
        with file_errors(self.root):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _check_unchanged(self) -> None:
        """Raises ConfigError when config.toml is not the one that this handle was made with."""
        if self.stored is None or _config_bytes(self.root) == self.stored:
            return
        raise ConfigError(
            "another process has started the run directory with another configuration",
            where=str(self.root),
            expected="equal values (ours, stored)",
            found=", ".join(differing_keys(self.config, self.open(self.root).config)[:3]) or "another file",
            remedy="choose another --run",
        )

    def remove_leftovers(self) -> list[Path]:
        """Remove the hidden temporaries of killed writers anywhere in the run, under the lock; returns what was removed."""
        if self.root not in _HELD:
            with self.lock():
                return []  # taking the lock has removed them
        removed = []
        with file_errors(self.root):
            for folder, _, _ in sorted(os.walk(self.root)):
                removed.extend(remove_leftovers(Path(folder), everything=True))
        return removed


def _absolute(root: Path | str) -> Path:
    return Path(os.path.realpath(Path(root).expanduser()))


def _config_bytes(root: Path) -> bytes:
    with file_errors(root):
        return (root / CONFIG_FILE).read_bytes()


def _stored_config(root: Path) -> tuple[Config, bytes]:
    """The stored configuration and the bytes it was read from."""
    path = root / CONFIG_FILE
    if not path.is_file():
        what = "the directory is not a run directory" if root.is_dir() else "the run directory does not exist"
        if root.exists() and not root.is_dir():
            what = "the run directory is not a directory"
        raise ArtifactError(what, where=str(root), expected=CONFIG_FILE, remedy="start one with `rsipo loop --run DIR`")
    content = _config_bytes(root)
    try:
        data = tomllib.loads(content.decode())
    except ValueError as error:  # TOML or UTF-8
        raise ArtifactError("the run's configuration is damaged", where=str(path), found=str(error)) from error
    if data.get("version") != CONFIG_VERSION:
        raise ArtifactError(
            "the run directory is of another version",
            where=str(path),
            expected=f"version {CONFIG_VERSION}",
            found=data.get("version", "none"),
            remedy="use the release that wrote it, or start a new run directory",
        )
    try:
        return config_from_mapping(data), content
    except ConfigError as error:
        raise ArtifactError(
            f"the run's configuration does not fit this release: {error.what}",
            where=f"{path}, {error.where}",
            expected=error.expected,
            found=error.found,
            remedy="use the release that wrote it, or start a new run directory",
        ) from error


def free_space_check(path: Path, need_bytes: int) -> None:
    """Raise RsipoError (exit code 1) when fewer than `need_bytes` are free where `path` is or will be."""
    existing = _absolute(path)
    while not existing.exists():
        existing = existing.parent
    with file_errors(existing):
        free = shutil.disk_usage(existing).free
    if free < need_bytes:
        raise RsipoError(
            "too little disk space",
            where=str(path),
            expected=f"at least {need_bytes / 1e6:,.0f} MB free",
            found=f"{free / 1e6:,.0f} MB",
            remedy="free some space, lower run.keep_last, or choose another --run",
        )
