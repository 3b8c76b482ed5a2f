"""A scripted player that reads text only and follows a given plan, right or wrong.

It sees what a policy sees, searches receptacles in the order in which the room lists them, and never looks at hidden
state, so that its episodes teach searching and not guessing. The plan is a separate choice: a wrong one (a step left out,
a wrong tool, a wrong order) is carried out just as faithfully, and then the player stands idle. That split is what lets a
model trained on these episodes profit from a good skill and be harmed by a bad one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

Plan = tuple[str, ...]

GOOD_PLANS: dict[str, Plan] = {
    "pick_and_place_simple": ("take", "move"),
    "look_at_obj_in_light": ("take", "use"),
    "pick_clean_then_place_in_recep": ("take", "clean", "move"),
    "pick_heat_then_place_in_recep": ("take", "heat", "move"),
    "pick_cool_then_place_in_recep": ("take", "cool", "move"),
    "pick_two_obj_and_place": ("take", "move", "take", "move"),
}
TOOLS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
NOTHING_HAPPENS = "Nothing happens."
IDLE = ("done", "inventory")

_ENTITY = re.compile(r"\ba ([a-z]+) (\d+)")


def bad_plans(task_type: str, tools_at_hand: Sequence[str] = ()) -> list[Plan]:
    """Plans that do not reach the goal of `task_type`; `tools_at_hand` names steps (clean, heat, cool) the room and object allow.

    >>> bad_plans("pick_clean_then_place_in_recep")
    [('take',), ('take', 'move')]
    """
    if task_type == "look_at_obj_in_light":
        return [("take",), ("use",), ("use", "take")]
    if task_type == "pick_two_obj_and_place":
        return [("take",), ("take", "move"), ("take", "move", "take")]
    good = GOOD_PLANS[task_type]
    plans: list[Plan] = [("take",)]
    if len(good) == 3:
        plans.append(("take", "move"))
        plans += [("take", tool, "move") for tool in tools_at_hand if tool != good[1]]
    else:
        plans += [("take", tool) for tool in tools_at_hand]
    return plans


@dataclass
class Demonstrator:
    """Plays one episode; a thought names the object first and then what is to be done with it.

    `target` and `destination` are lower-case classes; `destination` is the lamp of a look task."""

    target: str
    destination: str
    plan: Plan
    _step: int = 0
    _started: bool = False
    _rooms: list[str] = field(default_factory=list)
    _visited: list[str] = field(default_factory=list)
    _places: dict[str, str] = field(default_factory=dict)  # object instance -> receptacle where it was seen
    _placed: list[str] = field(default_factory=list)
    _at: str | None = None
    _closed: bool = False
    _holding: str | None = None

    def reply(self, observation: str) -> tuple[str, str]:
        """(thought, action) for what was just seen."""
        self._read(observation)
        thought, action = self._act()
        if not self._started:
            self._started = True
            thought = "plan: " + ", ".join(self.plan)
        self.foresee(action)
        return thought, action

    def _read(self, observation: str) -> None:
        names = [f"{name} {number}" for name, number in _ENTITY.findall(observation)]
        if not self._rooms:
            self._rooms = names
            return
        if self._at is None or observation.startswith(NOTHING_HAPPENS):
            return
        self._closed = observation.rstrip().endswith(f"The {self._at} is closed.")
        if "you see" in observation and "Next to it" not in observation:
            for name in names:
                self._places[name] = self._at

    def foresee(self, action: str) -> None:
        """Take into account what `action` will have done: its own actions, or a step somebody else made it take."""
        verb, _, rest = action.partition(" ")
        if verb == "go":
            self._at, self._closed = rest.removeprefix("to "), False
            if self._at not in self._visited:
                self._visited.append(self._at)
        elif verb == "take":
            self._holding = rest.split(" from ")[0]
            self._places.pop(self._holding, None)
            self._step += 1
        elif verb == "move":
            self._placed.append(self._holding or "")
            self._holding = None
            self._step += 1
        elif verb in TOOLS or verb == "use":
            self._step += 1

    def _act(self) -> tuple[str, str]:
        if self._step >= len(self.plan):
            return IDLE
        step = self.plan[self._step]
        if step == "take":
            return self._take()
        if step == "use":
            return self._use()
        if self._holding is None:
            return IDLE
        if step == "move":
            return self._move()
        return self._apply_tool(step)

    def _instance(self, name: str) -> str | None:
        """The first seen instance of a class that was not placed already."""
        for entity in self._places:
            if entity.split(" ")[0] == name and entity not in self._placed:
                return entity
        return None

    def _search(self, thought: str) -> tuple[str, str]:
        if self._closed and self._at is not None:
            return thought, f"open {self._at}"
        for receptacle in self._rooms:
            if receptacle not in self._visited:
                return thought, f"go to {receptacle}"
        return IDLE

    def _take(self) -> tuple[str, str]:
        entity = self._instance(self.target)
        if entity is None:
            return self._search(f"the {self.target}: find")
        place = self._places[entity]
        if place != self._at:
            return f"the {entity}: reach", f"go to {place}"
        return f"the {entity}: take", f"take {entity} from {place}"

    def _use(self) -> tuple[str, str]:
        entity = self._instance("desklamp")
        if entity is None:
            return self._search("the desklamp: find")
        if self._places[entity] != self._at:
            return f"the {entity}: reach", f"go to {self._places[entity]}"
        return f"the {entity}: use", f"use {entity}"

    def _listed(self, name: str) -> str | None:
        return next((receptacle for receptacle in self._rooms if receptacle.split(" ")[0] == name), None)

    def _apply_tool(self, step: str) -> tuple[str, str]:
        tool = self._listed(TOOLS[step])
        if tool is None:
            return IDLE
        thought = f"the {self._holding}: {step}"
        if self._at != tool:
            return thought, f"go to {tool}"
        return thought, f"{step} {self._holding} with {tool}"

    def _move(self) -> tuple[str, str]:
        place = self._listed(self.destination)
        if place is None:
            return IDLE
        thought = f"the {self._holding}: move"
        if self._at != place:
            return thought, f"go to {place}"
        if self._closed:
            return thought, f"open {place}"
        return thought, f"move {self._holding} to {place}"
