"""Publishing is all or nothing, damage is noticed, and leftovers of killed processes go away."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from schemas import artifacts
from schemas.artifacts import (
    MANIFEST,
    FileEntry,
    Manifest,
    file_errors,
    publish_directory,
    read_manifest,
    remove_leftovers,
    sha256_file,
    sha256_json,
    status,
    write_file,
)
from schemas.errors import ArtifactError, RsipoError
from tests.kill_points import calls_until_end, killed_at


def _write(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "a.txt").write_text("alpha")
    (folder / "deep" / "b.bin").write_bytes(bytes(range(256)))


def _publish(target: Path, **options: object) -> Manifest:
    return publish_directory(target, kind="test", inputs={"x": "1" * 64}, write=_write, **options)  # type: ignore[arg-type]


def test_a_published_directory_reads_back_with_the_manifest_it_was_given(tmp_path: Path) -> None:
    manifest = _publish(tmp_path / "out", extra={"note": "é", "value": 0.1})
    assert read_manifest(tmp_path / "out") == manifest
    assert set(manifest.files) == {"a.txt", "deep/b.bin"}
    assert manifest.files["a.txt"] == FileEntry(sha256_file(tmp_path / "out" / "a.txt"), 5)
    assert manifest.sha256 == sha256_file(tmp_path / "out" / MANIFEST)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_equal_content_gives_an_equal_manifest_whatever_the_order_of_writing(tmp_path: Path) -> None:
    def backwards(folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "b.bin").write_bytes(bytes(range(256)))
        (folder / "a.txt").write_text("alpha")

    first = _publish(tmp_path / "one")
    second = publish_directory(tmp_path / "two", kind="test", inputs={"x": "1" * 64}, write=backwards)
    assert first.sha256 == second.sha256


def test_canonical_json_refuses_nan() -> None:
    with pytest.raises(ValueError):
        sha256_json({"x": float("nan")})


def test_a_failing_writer_leaves_nothing_and_keeps_the_old_artefact(tmp_path: Path) -> None:
    old = _publish(tmp_path / "out")

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        publish_directory(tmp_path / "out", kind="test", inputs={}, write=fail, replace=True)
    assert read_manifest(tmp_path / "out") == old
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_existing_artefact_is_replaced_only_on_request(tmp_path: Path) -> None:
    _publish(tmp_path / "out")
    with pytest.raises(ArtifactError, match="exists already"):
        _publish(tmp_path / "out")
    (tmp_path / "out" / "a.txt").write_text("omega")
    _publish(tmp_path / "out", replace=True)
    read_manifest(tmp_path / "out")


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="plain files"):
        publish_directory(
            tmp_path / "out", kind="test", inputs={}, write=lambda folder: (folder / "l").symlink_to("/etc/hosts")
        )


@pytest.mark.parametrize("name", ["a.txt", "deep/b.bin"])
def test_a_flipped_bit_is_noticed_only_when_hashes_are_verified(tmp_path: Path, name: str) -> None:
    _publish(tmp_path / "out")
    path = tmp_path / "out" / name
    content = bytearray(path.read_bytes())
    content[2] ^= 1
    path.write_bytes(content)
    read_manifest(tmp_path / "out", verify=False)
    with pytest.raises(ArtifactError, match="damaged") as caught:
        read_manifest(tmp_path / "out")
    assert name in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_truncated_missing_or_stray_file_is_noticed_by_size_alone(tmp_path: Path) -> None:
    for change in ("truncate", "remove", "add"):
        target = tmp_path / change
        _publish(target)
        path = target / "a.txt"
        if change == "truncate":
            path.write_text("alph")
        elif change == "remove":
            path.unlink()
        else:
            (target / "stray").write_text("?")
        with pytest.raises(ArtifactError):
            read_manifest(target, verify=False)


def test_a_flipped_bit_in_any_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    _publish(tmp_path / "out", extra={"weights": "abc", "loss": 0.25})
    path = tmp_path / "out" / MANIFEST
    content = path.read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 7
        path.write_bytes(flipped)
        with pytest.raises(ArtifactError):
            read_manifest(tmp_path / "out")


def test_a_manifest_of_another_version_says_so(tmp_path: Path) -> None:
    manifest = _publish(tmp_path / "out")
    newer = Manifest(manifest.kind, manifest.inputs, manifest.files, manifest.extra, version=2)
    (tmp_path / "out" / MANIFEST).write_bytes(newer.to_bytes())
    with pytest.raises(ArtifactError, match="another version.*found 2"):
        read_manifest(tmp_path / "out")


def test_a_manifest_cannot_name_files_outside_its_artefact(tmp_path: Path) -> None:
    manifest = _publish(tmp_path / "out")
    outside = Manifest(manifest.kind, {}, {"../secret": FileEntry("0" * 64, 1)}, {})
    (tmp_path / "out" / MANIFEST).write_bytes(outside.to_bytes())
    with pytest.raises(ArtifactError, match="damaged"):
        read_manifest(tmp_path / "out")


def test_missing_and_unfinished_artefacts_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="missing"):
        read_manifest(tmp_path / "none")
    (tmp_path / "half").mkdir()
    with pytest.raises(ArtifactError, match="unfinished"):
        read_manifest(tmp_path / "half")


def test_status_names_every_input_that_changed_came_or_went(tmp_path: Path) -> None:
    assert status(tmp_path / "out", {}).state == "absent"
    publish_directory(tmp_path / "out", kind="t", inputs={"a": "1", "b": "2", "c": "3"}, write=_write)
    assert status(tmp_path / "out", {"c": "3", "b": "2", "a": "1"}).state == "complete"
    found = status(tmp_path / "out", {"a": "1", "b": "9", "d": "4"})
    assert found.state == "stale"
    assert found.changed == ["b (was 2, is 9)", "c (was 3, is none)", "d (was none, is 4)"]


def test_leftovers_of_dead_processes_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    living = tmp_path / f".tmp-out-{child.pid}"
    living.mkdir()
    dead = tmp_path / ".tmp-out-99999999"
    dead.mkdir()
    other = tmp_path / ".tmp-else-99999999"
    other.write_text("x")
    assert remove_leftovers(tmp_path, "out") == [dead]
    assert living.exists() and other.exists()
    child.communicate(b"\n")
    assert set(remove_leftovers(tmp_path)) == {living, other}


def test_a_kill_at_any_system_call_leaves_the_old_artefact_the_new_one_or_none(tmp_path: Path) -> None:
    def replace(target: Path) -> None:
        _publish_version(target, "new", replace=True)

    _publish_version(tmp_path / "count" / "out", "old")
    total = calls_until_end(lambda: replace(tmp_path / "count" / "out"))
    assert total > 10
    states = []
    for stop in range(1, total + 1):
        target = tmp_path / str(stop) / "out"
        _publish_version(target, "old")
        assert killed_at(stop, lambda target=target: replace(target))
        states.append(_version_of(target))
        replace(target)
        assert _version_of(target) == "new"
        assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert states[0] == "old" and states[-1] == "new"
    assert states == sorted(states, key=["old", "none", "new"].index)


def _publish_version(target: Path, version: str, *, replace: bool = False) -> None:
    def write(folder: Path) -> None:
        (folder / "a.txt").write_text(version)
        (folder / "b.txt").write_text(version * 1000)

    publish_directory(target, kind="t", inputs={"v": version}, write=write, replace=replace)


def _version_of(target: Path) -> str:
    """old, new or none; a mixture fails the test."""
    if status(target, {}).state == "absent":
        return "none"
    version = read_manifest(target).inputs["v"]
    assert (target / "a.txt").read_text() == version
    assert (target / "b.txt").read_text() == version * 1000
    return version


@pytest.mark.parametrize(
    ("number", "kind", "exit_code"),
    [
        (errno.ENOSPC, RsipoError, 1),
        (errno.EDQUOT, RsipoError, 1),
        (errno.EROFS, ArtifactError, 3),
        (errno.EACCES, ArtifactError, 3),
        (errno.EIO, ArtifactError, 3),
    ],
)
def test_failures_of_the_disk_have_their_documented_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[RsipoError], exit_code: int
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    write_file(tmp_path / "kept", b"old")
    monkeypatch.setattr(artifacts.os, "fsync", fail)
    with pytest.raises(kind) as caught:
        write_file(tmp_path / "kept", b"new")
    assert type(caught.value) is kind and caught.value.exit_code == exit_code
    with pytest.raises(kind):
        _publish(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_bytes() == b"old"


def test_a_library_that_reports_a_full_disk_in_words_is_understood() -> None:
    with pytest.raises(RsipoError, match="disk is full"), file_errors("x"):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    with pytest.raises(RuntimeError), file_errors("x"):
        raise RuntimeError("something else")


def test_a_target_whose_parent_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="file operation failed"):
        _publish(tmp_path / "file" / "out")
