"""Skills as text: what a plan reads like when written down, and skills that say nothing about the plan."""

from __future__ import annotations

import json
import random

from data.household.demonstrator import Plan

_PHRASES = {
    "take": ("take the object", "find the object and take it"),
    "clean": ("clean it with the sinkbasin", "wash it at the sinkbasin"),
    "heat": ("heat it with the microwave", "make it hot with the microwave"),
    "cool": ("cool it with the fridge", "make it cold with the fridge"),
    "move": ("move it to the target", "put it at the target"),
    "use": ("use the desklamp", "go to the desklamp and use it"),
}
_SECOND_TAKE = ("take the second object", "find the second object and take it")

VAGUE_SKILLS = (
    "look at every place with care before you act",
    "work on the task one step at a time",
    "check the room first and stay calm while you work",
    "read the task again and think before every action",
    "do not give up and keep on looking around",
)


def skill_text(plan: Plan, rng: random.Random) -> str:
    """A workflow that spells out `plan`, with phrases drawn by `rng`."""
    phrases = []
    for position, step in enumerate(plan):
        options = _SECOND_TAKE if step == "take" and "take" in plan[:position] else _PHRASES[step]
        phrases.append(rng.choice(options))
    if len(phrases) == 1:
        phrases.append("stop")
    return "first " + ", then ".join(phrases) + "."


def vague_skill(rng: random.Random) -> str:
    """A well-formed skill that does not say what to do."""
    return rng.choice(VAGUE_SKILLS) + "."


def skill_reply(skill: str, plan: Plan | None) -> str:
    """The JSON a skill writer returns."""
    return json.dumps({"summary": " and ".join(plan) if plan else "general advice", "skill": skill})
