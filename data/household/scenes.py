"""The 120 floor plans: which receptacles a room has, where one stands to reach them, and what may lie about.

Read from the layouts of the installed alfworld wheel. The layouts leave out fixtures that the official games have
(garbage cans, stove burners, coffee machines, towel holders); they are added here at places derived from the scene's
number alone. Scenes 10, 219, 308 and 424 are the official unseen split and are never used for training.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from data.household.catalog import catalog, wheel_directory
from schemas.errors import ArtifactError, ConfigError

SPLITS = ("train", "valid_seen", "valid_unseen")
UNSEEN_SCENES = frozenset({10, 219, 308, 424})
SCENE_NUMBERS = (*range(1, 31), *range(201, 231), *range(301, 331), *range(401, 431))
ROOMS = {0: "Kitchen", 2: "LivingRoom", 3: "Bedroom", 4: "Bathroom"}

# How many of a kind a scene gets when its object list names the kind and its layout has none of it.
FIXTURES = {"StoveBurner": 4, "Cabinet": 3, "Drawer": 2, "Shelf": 2}
GRID = 4  # locations count quarter metres

Point = tuple[float, float, float]  # x, height, z in metres


@dataclass(frozen=True)
class Receptacle:
    """One receptacle: its PDDL identifier, its class, the PDDL location that reaches it, its place in metres."""

    identifier: str
    kind: str
    location: str
    place: Point


@dataclass(frozen=True)
class Scene:
    """One floor plan. `object_kinds` are all classes seen there, sorted."""

    number: int
    room: str
    receptacles: tuple[Receptacle, ...]
    object_kinds: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"FloorPlan{self.number}"

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(receptacle.kind for receptacle in self.receptacles)


def scene_numbers(split: str) -> tuple[int, ...]:
    """The floor plans of a split: the four unseen ones for valid_unseen, all others for train and valid_seen."""
    if split not in SPLITS:
        raise ConfigError("unknown split", where="split", expected=f"one of {', '.join(SPLITS)}", found=repr(split))
    return tuple(number for number in SCENE_NUMBERS if (number in UNSEEN_SCENES) == (split == "valid_unseen"))


@cache
def scene(number: int) -> Scene:
    """Read one floor plan and add its fixtures. Raises ConfigError for a number that no floor plan has."""
    if number not in SCENE_NUMBERS:
        raise ConfigError("no such floor plan", where="scene", expected="1-30, 201-230, 301-330, 401-430", found=number)
    folder = wheel_directory() / "gen" / "layouts"
    kinds = _read_json(folder / f"FloorPlan{number}-objects.json")
    poses = _read_json(folder / f"FloorPlan{number}-openable.json")
    receptacles = [_from_layout(name, pose) for name, pose in sorted(poses.items())]
    receptacles += _fixtures(number, frozenset(kinds), receptacles)
    known = [receptacle for receptacle in receptacles if receptacle.kind in catalog().contents]
    return Scene(number, ROOMS[number // 100], tuple(known), tuple(sorted(set(kinds))))


def identifier(kind: str, place: Point) -> str:
    """An ALFWorld object id in PDDL spelling.

    >>> identifier("Apple", (-1.5, 0.9, 0.25))
    'Apple_bar__minus_01_dot_50_bar__plus_00_dot_90_bar__plus_00_dot_25'
    """
    return _mangle("|".join([kind, *(f"{value:+06.2f}" for value in place)]))


def location(x: int, z: int, rotation: int, horizon: int) -> str:
    """A place to stand, in quarter metres, quarter turns and degrees, in PDDL spelling.

    >>> location(-3, 5, 1, 60)
    'loc_bar__minus_3_bar_5_bar_1_bar_60'
    """
    return _mangle(f"loc|{x}|{z}|{rotation}|{horizon}")


def _from_layout(name: str, pose: list[float]) -> Receptacle:
    parts = name.split("|")
    kind = parts[-1] if parts[-1].endswith("Basin") else parts[0]
    x, z, rotation, horizon = pose
    reach = location(round(x * GRID), round(z * GRID), round(rotation / 90) % 4, round(horizon))
    return Receptacle(_mangle(name), kind, reach, (float(parts[1]), float(parts[2]), float(parts[3])))


def _fixtures(number: int, kinds: frozenset[str], present: list[Receptacle]) -> list[Receptacle]:
    """The receptacles that the scene's object list names and its layout lacks, at places drawn from the number."""
    missing = sorted((kinds & set(catalog().contents)) - {receptacle.kind for receptacle in present})
    xs, zs = [r.place[0] for r in present], [r.place[2] for r in present]
    taken = {receptacle.location for receptacle in present}
    added: list[Receptacle] = []
    for kind in missing:
        for k in range(FIXTURES.get(kind, 1)):
            u, v, w = _fractions(f"{number}/{kind}/{k}")
            place = (
                round(min(xs) + u * (max(xs) - min(xs)), 2),
                round(1.5 * w if kind != "GarbageCan" else 0.0, 2),
                round(min(zs) + v * (max(zs) - min(zs)), 2),
            )
            if kind == "StoveBurner" and k % 2:  # the two burners of a row are reached from one place
                reach = added[-1].location
            else:
                reach = _free_location(place, taken)
                taken.add(reach)
            name = identifier(kind, place)
            if kind.endswith("Basin"):  # a basin is named after its sink or bathtub
                name = identifier(kind.removesuffix("Basin"), place) + f"_bar_{kind}"
            added.append(Receptacle(name, kind, reach, place))
    return added


def _free_location(place: Point, taken: set[str]) -> str:
    """The first grid place next to `place` that reaches no other receptacle yet."""
    x, z, rotation = round(place[0] * GRID), round(place[2] * GRID), 0
    while (reach := location(x, z, rotation, 60)) in taken:
        rotation = (rotation + 1) % 4
        x += rotation == 0
    return reach


def _fractions(key: str) -> tuple[float, float, float]:
    """Three numbers in [0, 1) that depend on `key` alone."""
    digest = hashlib.sha256(f"household-fixture/{key}".encode()).digest()
    return tuple(int.from_bytes(digest[i : i + 4], "big") / 2**32 for i in (0, 4, 8))  # type: ignore[return-value]


def _mangle(name: str) -> str:
    for character, word in (("|", "_bar_"), ("+", "_plus_"), ("-", "_minus_"), (".", "_dot_")):
        name = name.replace(character, word)
    return name


def _read_json(path: Path) -> dict[str, list[float]] | list[str]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(
            "cannot read a floor plan", where=str(path), found=str(error), remedy="reinstall alfworld==0.4.2"
        ) from error
