"""Trackers get explicit steps and never stop a training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.progress import SilentReporter
from schemas.errors import ConfigError
from stages.trackers import Trackers, build_tracker


class Recorded(SilentReporter):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Failing:
    def start(self, root: Path, config: object, attempt: str) -> None: ...

    def log(self, step: int, figures: object) -> None:
        raise RuntimeError("no network")

    def finish(self) -> None:
        raise AssertionError("a dropped tracker is not told again")


def test_figures_carry_their_step_and_every_start_is_a_new_attempt(tmp_path: Path) -> None:
    for _ in range(2):
        trackers = Trackers(["jsonl"], Recorded())
        trackers.start(tmp_path, {})
        trackers.log(3, "rollout", {"success": 0.5, "skills": 4, "text": "x", "done": True, "missing": None})
        trackers.finish()
    files = sorted((tmp_path / "logs").glob("figures-*.jsonl"))
    assert len(files) == 2
    assert json.loads(files[0].read_text()) == {"step": 3, "rollout/success": 0.5, "rollout/skills": 4.0}


def test_a_failing_tracker_is_dropped_with_a_note_and_the_others_go_on(tmp_path: Path) -> None:
    reporter = Recorded()
    trackers = Trackers([f"{__name__}:Failing", "jsonl"], reporter)
    trackers.start(tmp_path, {})
    trackers.log(1, "rollout", {"success": 0.1})
    trackers.log(2, "rollout", {"success": 0.2})
    trackers.finish()
    assert len(reporter.notes) == 1 and "no network" in reporter.notes[0]
    (file,) = (tmp_path / "logs").glob("figures-*.jsonl")
    assert len(file.read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["nonsense", "json:Nope", "no_such_module:Class"])
def test_an_unknown_tracker_is_a_configuration_error(name: str) -> None:
    with pytest.raises(ConfigError, match="run.trackers"):
        build_tracker(name)
