"""A run directory keeps its configuration, refuses a second writer and forgets what killed writers left."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from schemas import artifacts, run_directory
from schemas.artifacts import publish_directory
from schemas.config import Config
from schemas.config_loading import load_config, override_config
from schemas.errors import ArtifactError, ConfigError, LockError, RsipoError
from schemas.run_directory import RunDirectory, free_space_check
from tests.kill_points import calls_until_end, killed_at

ROOT = Path(__file__).parent.parent


def test_paths_follow_the_layout_and_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create(Path("a") / "run", Config())
    assert run.root == tmp_path / "a" / "run"
    assert run.step_dir("rollouts", 1) == run.root / "rollouts" / "step=00001"
    assert run.checkpoint_dir(0) == run.root / "checkpoints" / "step=00000"
    assert run.panel_path("train").parent == run.root / "panels"
    assert run.log_path.parent == run.root / "logs"


def test_an_equal_configuration_resumes_and_another_one_is_refused_by_its_keys(tmp_path: Path) -> None:
    config = load_config(None, None, ["rollout.group_size=4"])
    run = RunDirectory.create(tmp_path / "run", config)
    assert RunDirectory.create(tmp_path / "run", config) == run == RunDirectory.open(tmp_path / "run")
    (run.root / "rollouts").mkdir()  # it has made something
    before = (run.root / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match=r"rollout.group_size \(4, 8\)") as caught:
        RunDirectory.create(tmp_path / "run", Config())
    assert caught.value.exit_code == 2
    many = override_config(config, ["run.seed=1", "run.steps=2", "replay.replays=3", "optimizer.lr=1"])
    with pytest.raises(ConfigError, match="and 1 more"):
        RunDirectory.create(tmp_path / "run", many)
    assert (run.root / "config.toml").read_bytes() == before


STARTER = """
import sys
from schemas.config_loading import load_config
from schemas.run_directory import RunDirectory
RunDirectory.create(sys.argv[1], load_config(None, None, ["run.seed=7"]))
"""


@pytest.mark.parametrize("moment", ["lock", "write_file"])
def test_of_two_first_starts_with_different_configurations_one_fails_and_the_others_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    root, codes = tmp_path / "run", []
    owner = RunDirectory if moment == "lock" else run_directory
    original = getattr(owner, moment)

    def overtaken(*arguments: object) -> object:
        """Another process starts the run after this one has found none."""
        if not codes:
            command = [sys.executable, "-c", STARTER, str(root)]
            codes.append(subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL, check=False).returncode)
        return original(*arguments)

    monkeypatch.setattr(owner, moment, overtaken)
    try:
        mine = RunDirectory.create(root, Config())
    except ConfigError:
        assert codes == [0] and RunDirectory.open(root).config.run.seed == 7
    else:
        assert RunDirectory.open(root) == mine
        if codes == [0]:  # the other had made nothing yet, and can no longer begin
            other = RunDirectory(root, load_config(None, None, ["run.seed=7"]), b"as it was")
            with pytest.raises(ConfigError, match="another process"), other.lock():
                pass


def test_a_run_that_has_made_nothing_takes_another_configuration_and_the_first_owner_cannot_begin(
    tmp_path: Path,
) -> None:
    first = RunDirectory.create(tmp_path / "run", Config())
    (first.root / "logs").mkdir()
    (first.root / "panels").mkdir()
    (first.root / "panels" / "train.json").write_text("of the first configuration")
    second = RunDirectory.create(tmp_path / "run", load_config(None, None, ["run.seed=7"]))
    assert RunDirectory.open(tmp_path / "run") == second and not (second.root / "panels").exists()
    with pytest.raises(ConfigError, match=r"another process.*run.seed \(0, 7\)"), first.lock():
        pass
    with second.lock():
        pass


@pytest.mark.parametrize("name", ["rollouts", "checkpoints", "sft"])
def test_a_run_that_has_made_something_keeps_its_configuration(tmp_path: Path, name: str) -> None:
    run = RunDirectory.create(tmp_path / "run", Config())
    (run.root / name).mkdir()
    with pytest.raises(ConfigError, match="was started with another configuration"):
        RunDirectory.create(tmp_path / "run", load_config(None, None, ["run.seed=7"]))
    assert RunDirectory.open(tmp_path / "run") == run


def test_a_run_directory_of_another_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", Config())
    path = run.root / "config.toml"
    path.write_text(path.read_text().replace("version = 1", "version = 7", 1))
    for open_it in (lambda: RunDirectory.open(run.root), lambda: RunDirectory.create(run.root, Config())):
        with pytest.raises(ArtifactError, match="expected version 1, found 7") as caught:
            open_it()
        assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "another version"),
        (b"version = 1\n[run\n", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"version = 1\n[rollout]\ngroup_siz = 3\n", "does not fit this release: unknown key"),
        (b"version = 1\n[rollout]\ngroup_size = 1\n", "expected >= 2, found 1"),
    ],
)
def test_a_damaged_configuration_is_one_sentence_with_exit_code_3(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.toml").write_bytes(content)
    with pytest.raises(ArtifactError, match=words):
        RunDirectory.open(tmp_path)


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not exist"):
        RunDirectory.open(tmp_path / "none")
    with pytest.raises(ArtifactError, match="not a run directory"):
        RunDirectory.open(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="not a directory"):
        RunDirectory.create(tmp_path / "file", Config())
    with pytest.raises(ArtifactError):
        RunDirectory.create(tmp_path / "file" / "run", Config())


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_directory_that_cannot_be_written_exits_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(self: Path, *args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ArtifactError, match="cannot be read or written.*choose another place") as caught:
        RunDirectory.create(tmp_path / "run", Config())
    assert caught.value.exit_code == 3


def test_a_lock_that_cannot_be_made_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path / "run", Config())

    def refuse(*args: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(run_directory.os, "open", refuse)
    with pytest.raises(ArtifactError, match="cannot be read or written"), run.lock():
        pass


HOLDER = """
import sys
from schemas.run_directory import RunDirectory
run = RunDirectory.open(sys.argv[1])
with run.lock():
    (run.root / ".tmp-half-1").mkdir()
    print("locked", flush=True)
    input()
"""


def _holder(root: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    return process


def test_a_second_writer_is_refused_by_name_until_the_first_one_ends(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", Config())
    holder = _holder(run.root)
    with pytest.raises(LockError, match=f"process {holder.pid} on ") as caught, run.lock():
        pass
    assert caught.value.exit_code == 4
    assert RunDirectory.open(run.root) == run  # readers never lock
    assert (run.root / ".tmp-half-1").exists()
    holder.communicate("\n")
    with run.lock():
        assert not (run.root / ".tmp-half-1").exists()


def test_a_killed_writer_holds_no_lock(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", Config())
    holder = _holder(run.root)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with run.lock():
        pass


def test_the_lock_is_re_entrant_and_let_go_of_after_an_error(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", Config())
    with pytest.raises(RuntimeError), run.lock():
        with RunDirectory.open(run.root).lock():
            assert (run.root / ".lock").read_text().startswith(f"process {os.getpid()} on ")
        raise RuntimeError("stop")
    assert (run.root / ".lock").read_text() == ""
    _holder(run.root).communicate("\n")


def test_leftovers_anywhere_in_the_run_are_removed_and_named(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", Config())
    run.step_dir("rollouts", 1).mkdir(parents=True)
    leftovers = [
        run.root / f".tmp-panels-{os.getppid()}",
        run.step_dir("rollouts", 1) / ".tmp-part-00000.parquet-77",
        run.root / "checkpoints" / ".tmp-step=00001-77",
    ]
    for path in leftovers:
        path.mkdir(parents=True)
        (path / "weights").write_text("half")
    with run.lock():
        assert not any(path.exists() for path in leftovers)
        leftovers[1].write_text("x")
        assert run.remove_leftovers() == [leftovers[1]]
    assert (run.root / "config.toml").exists()


def test_a_kill_while_a_run_is_started_leaves_no_run_or_a_whole_one(tmp_path: Path) -> None:
    total = calls_until_end(lambda: RunDirectory.create(tmp_path / "count" / "run", Config()))
    for stop in range(1, total + 1):
        root = tmp_path / str(stop) / "run"
        assert killed_at(stop, lambda root=root: RunDirectory.create(root, Config()))
        with RunDirectory.create(root, Config()).lock():
            assert sorted(path.name for path in root.iterdir()) == [".lock", "config.toml"]


def test_finished_steps_are_those_with_a_manifest(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", Config())
    assert run.finished_steps("checkpoints") == []
    for step in (12, 0, 3):
        publish_directory(run.checkpoint_dir(step), kind="checkpoint", inputs={}, write=lambda folder: None)
    run.checkpoint_dir(13).mkdir()
    assert run.finished_steps("checkpoints") == [0, 3, 12]


def test_too_little_space_is_told_before_anything_is_written(tmp_path: Path) -> None:
    free_space_check(tmp_path / "not" / "there" / "yet", 1)
    with pytest.raises(RsipoError, match="too little disk space") as caught:
        free_space_check(tmp_path / "run", 10**18)
    assert caught.value.exit_code == 1


def test_a_full_disk_while_a_run_is_started_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "run").mkdir()
    monkeypatch.setattr(artifacts.os, "fsync", full)
    with pytest.raises(RsipoError, match="disk is full"):
        RunDirectory.create(tmp_path / "run", Config())
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
