"""The official ALFWorld data as a directory tree: `json_2.1.x/{train,valid_seen,valid_unseen}/<task>/<trial>/`.

A trial holds `game.tw-pddl` (the problem, the instruction inside its grammar, whether it is solvable) and
`traj_data.json` (type and parameters). As the official loader does, paths with `movable` or `Sliced` and games marked
unsolvable are left out. Trials without a game and games that cannot be read are reported, never dropped in silence. Ids are paths relative to the
tree, so that they are the same on every machine.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.household.panel_file import parse_row
from data.household.scenes import SPLITS
from data.tasks import Task
from schemas.errors import ArtifactError

TREE = "json_2.1.x"
GAME, TRAJECTORY = "game.tw-pddl", "traj_data.json"
OFFICIAL_COUNTS: Mapping[str, int] = {"train": 3553, "valid_seen": 140, "valid_unseen": 134}
SHOWN = 5
_INSTRUCTION = re.compile(r"Your task is to: (.+?)\.\"")


@dataclass(frozen=True)
class TreeReport:
    """What was read from a tree and what was not."""

    counts: Mapping[str, int]  # split -> solvable games read
    left_out: int  # movable, sliced or unsolvable
    missing: tuple[str, ...]  # trials that hold no game file, sorted
    bad: tuple[str, ...]  # one sentence for each game that cannot be read, sorted by path

    def warnings(self, *, whole_splits: bool) -> list[str]:
        """Sentences for the user: bad games, and splits whose count is not the official one."""
        found = []
        for what, names in (("games cannot be read", self.bad), ("trials hold no game", self.missing)):
            if names:
                shown = "; ".join(names[:SHOWN]) + ("; ..." if len(names) > SHOWN else "")
                found.append(f"{len(names)} {what}: {shown}")
        if whole_splits:
            for split, count in self.counts.items():
                official = OFFICIAL_COUNTS.get(split)
                if official is not None and count != official:
                    found.append(f"{split} has {count} solvable games, the official data has {official}")
        return found


def read_tree(folder: Path, split: str | None = None) -> tuple[list[Task], TreeReport]:
    """The games below `folder` (the data directory, the tree, a split or a part of one), sorted by id.

    Raises ArtifactError when the folder does not exist or holds no readable game.
    """
    folder = Path(folder)
    if (folder / TREE).is_dir():
        folder = folder / TREE
    if split is not None:
        folder = folder / split
    if not folder.is_dir():
        raise ArtifactError(
            "no such directory of games",
            where=str(folder),
            expected=f"a tree {TREE}/<split>/<task>/<trial>/{GAME}",
            remedy="check the path, or fetch the data with `alfworld-download`",
        )
    base = _base(folder)
    tasks, bad, missing, left_out = [], [], [], 0
    for trajectory in sorted(folder.rglob(TRAJECTORY), key=lambda path: path.relative_to(base).as_posix()):
        trial = trajectory.parent.relative_to(base).as_posix()
        if "movable" in trial or "Sliced" in trial:
            left_out += 1
            continue
        if not (trajectory.parent / GAME).is_file():
            missing.append(trial)
            continue
        try:
            task = _read_trial(trajectory.parent, trial)
        except ArtifactError as error:
            bad.append(error.sentence())
            continue
        if task is None:
            left_out += 1
        else:
            tasks.append(task)
    if not tasks:
        raise ArtifactError(
            "the directory holds no readable game",
            where=str(folder),
            expected=f"trials with {GAME} and {TRAJECTORY}",
            found=bad[0] if bad else f"{left_out} games to leave out and {len(missing)} trials without a game",
            remedy="check the path, or fetch the data with `alfworld-download`",
        )
    counts = Counter(task.split for task in tasks)
    return tasks, TreeReport(dict(sorted(counts.items())), left_out, tuple(missing), tuple(bad))


def _base(folder: Path) -> Path:
    """The directory that ids are relative to: the one above the split, or the folder itself when it lies in no split."""
    for candidate in (folder, *folder.absolute().parents):
        if candidate.name in SPLITS:
            return candidate.parent if candidate != folder else folder.parent
    return folder


def _read_trial(folder: Path, trial: str) -> Task | None:
    """One game, or None when it is marked unsolvable. Raises ArtifactError naming the file."""
    trajectory, game = _read_object(folder / TRAJECTORY), _read_object(folder / GAME)
    if not game.get("solvable", False):
        return None
    scene = trajectory.get("scene")
    first = trial.split("/", 1)[0]
    row = {
        "id": trial,
        "split": first if first in SPLITS else "custom",
        "task_type": trajectory.get("task_type"),
        "task": _instruction(game.get("grammar")),
        "pddl_params": trajectory.get("pddl_params"),
        "scene": scene.get("floor_plan") if isinstance(scene, Mapping) else None,
        "pddl_problem": game.get("pddl_problem"),
    }
    return parse_row(row, where=str(folder))


def _instruction(grammar: Any) -> str | None:
    """The sentence that the game's own grammar announces, without the full stop."""
    found = _INSTRUCTION.search(grammar) if isinstance(grammar, str) else None
    return found.group(1) if found else None


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError("cannot read a game", where=str(path), found=error.strerror or str(error)) from error
    except ValueError as error:
        raise ArtifactError("a game file is not JSON", where=str(path), found=str(error)) from error
    if not isinstance(value, dict):
        raise ArtifactError(
            "a game file is not an object", where=str(path), expected="a JSON object", found=type(value).__name__
        )
    return value
