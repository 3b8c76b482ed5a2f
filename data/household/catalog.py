"""What the household knows about its classes: what fits where, what can be cleaned, heated, cooled, sliced, opened.

The lists come from the installed alfworld wheel (`alfworld/gen/constants.py`, `alfworld/gen/goal_library.py`), read by
path: importing the package itself would create a cache directory in the user's home. The counts below are means over
340 official games and decide how full a generated receptacle is. Nothing here depends on a scene or a seed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from schemas.errors import ArtifactError

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)

# The receptacle at which a task type changes its object's state, and the capability the object needs.
STATIONS = {
    "pick_clean_then_place_in_recep": ("SinkBasin", "Cleanable"),
    "pick_heat_then_place_in_recep": ("Microwave", "Heatable"),
    "pick_cool_then_place_in_recep": ("Fridge", "Coolable"),
}

LAMP = "DeskLamp"  # a FloorLamp stands in no receptacle, so no game with it can be won
LAMP_HOLDERS = frozenset({"SideTable", "Desk", "Dresser", "Shelf", "CoffeeTable"})

# Things that are seen and named but cannot be taken, and where they stand.
DECOR: Mapping[str, frozenset[str]] = {
    "HousePlant": frozenset({"CounterTop", "SideTable", "DiningTable", "Shelf", "CoffeeTable", "Desk"}),
    "Television": frozenset({"TVStand", "Dresser"}),
}

# Mean number of objects in or on one receptacle of a kind (340 official games): the weight of a placement.
ATTRACTION: Mapping[str, float] = {
    "ArmChair": 1.0, "BathtubBasin": 1.2, "Bed": 3.9, "Cabinet": 0.4, "Cart": 3.4, "CoffeeMachine": 0.4,
    "CoffeeTable": 4.0, "CounterTop": 6.2, "Desk": 5.8, "DiningTable": 9.4, "Drawer": 0.5, "Dresser": 4.2,
    "Fridge": 4.1, "GarbageCan": 0.8, "HandTowelHolder": 0.8, "LaundryHamper": 0.1, "Microwave": 1.1, "Ottoman": 0.9,
    "Safe": 0.6, "Shelf": 1.1, "SideTable": 2.4, "SinkBasin": 1.6, "Sofa": 3.0, "StoveBurner": 0.6, "TVStand": 3.8,
    "Toaster": 0.0, "Toilet": 2.5, "ToiletPaperHanger": 0.2, "TowelHolder": 0.9,
}  # fmt: skip

# The most objects one receptacle of a kind held in those games, for the kinds where it matters.
CAPACITY: Mapping[str, int] = {
    "CoffeeMachine": 1, "HandTowelHolder": 1, "TowelHolder": 1, "ToiletPaperHanger": 1, "StoveBurner": 1,
    "LaundryHamper": 1, "Safe": 2, "Ottoman": 3, "BathtubBasin": 4, "Microwave": 4, "Cabinet": 4, "Drawer": 4,
    "ArmChair": 4, "GarbageCan": 5, "Sofa": 6, "SinkBasin": 7, "Bed": 7, "Toilet": 7, "Shelf": 8, "Fridge": 8,
}  # fmt: skip
UNLIMITED = 24


@dataclass(frozen=True)
class Catalog:
    """The class lists of the installed wheel, sliced objects and movable receptacles left out."""

    contents: Mapping[str, frozenset[str]]  # receptacle kind -> object kinds that can be put there
    capabilities: Mapping[str, frozenset[str]]  # "Cleanable" | "Heatable" | "Coolable" | "Sliceable" -> object kinds
    openable: frozenset[str]  # receptacle kinds with a door, lid or slide
    containers: frozenset[str]  # object kinds that could hold others (bowls, boxes)
    rooms: Mapping[str, frozenset[str]]  # task type -> room kinds where it makes sense
    goals: Mapping[str, str]  # task type -> PDDL goal with {obj}, {recep}, {toggle}
    instructions: Mapping[str, tuple[str, ...]]  # task type -> wordings with the same fields

    def holders(self, kind: str) -> frozenset[str]:
        """Receptacle kinds in which an object of `kind` may stand at the start."""
        if kind == LAMP:
            return LAMP_HOLDERS
        if kind in DECOR:
            return DECOR[kind]
        return frozenset(holder for holder, contents in self.contents.items() if kind in contents)


def wheel_directory() -> Path:
    """Where the installed alfworld package lies. Raises ArtifactError when it is not installed."""
    spec = importlib.util.find_spec("alfworld")
    if spec is None or not spec.submodule_search_locations:
        raise ArtifactError(
            "the household needs the alfworld package", expected="alfworld 0.4.2", remedy="pip install alfworld==0.4.2"
        )
    return Path(spec.submodule_search_locations[0])


@lru_cache(maxsize=1)
def catalog() -> Catalog:
    """The class lists, read once a process. Raises ArtifactError when the wheel is missing or misses a file."""
    constants, library = _load("gen/constants.py"), _load("gen/goal_library.py")
    movable = frozenset(constants.MOVABLE_RECEPTACLES)

    def whole(kinds: set[str]) -> frozenset[str]:
        return frozenset(kind for kind in kinds if not kind.endswith("Sliced"))

    return Catalog(
        contents={
            holder: whole(kinds)
            for holder, kinds in sorted(constants.VAL_RECEPTACLE_OBJECTS.items())
            if holder not in movable
        },
        capabilities={
            name: whole(constants.VAL_ACTION_OBJECTS[name])
            for name in ("Cleanable", "Heatable", "Coolable", "Sliceable")
        },
        openable=frozenset(constants.OPENABLE_CLASS_LIST) - movable,
        containers=movable,
        rooms={name: frozenset(constants.GOALS_VALID[name]) for name in TASK_TYPES},
        # "#" stands for "-" in the goal library, whose braces are str.format fields
        goals={name: library.gdict[name]["pddl"].replace("#", "-") for name in TASK_TYPES},
        instructions={name: tuple(library.gdict[name]["templates"]) for name in TASK_TYPES},
    )


def _load(relative: str) -> ModuleType:
    """Execute one self-contained module of the wheel under a private name, without importing its package."""
    path = wheel_directory() / relative
    spec = importlib.util.spec_from_file_location(f"_household_wheel_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ArtifactError("the alfworld package misses a file", where=str(path), remedy="reinstall alfworld==0.4.2")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
