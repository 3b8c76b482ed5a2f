"""Skills as text: what a plan of searches reads like when written down, and skills that say nothing about the plan."""

from __future__ import annotations

import json
import random

_SEARCHES = (
    ("search for the name in the question", "look up what the question names"),
    ("search for what you found", "look up what was found"),
    ("search for that as well", "look that up too"),
)
_ANSWER = ("answer with what was found last", "give the last find as the answer")
_NUMBERS = ("no search", "one search", "two searches", "three searches")
_AT_ONCE = ("answer at once", "give an answer without a search")

VAGUE_SKILLS = (
    "read the question with care before you act",
    "work on the question one step at a time",
    "stay calm and think before every reply",
    "do not give up and keep the question in mind",
    "be sure that you know what is asked",
)


def skill_text(searches: int, rng: random.Random) -> str:
    """A workflow that spells out a plan of `searches` (0 to 3) before the answer, with phrases drawn by `rng`."""
    phrases = [rng.choice(options) for options in _SEARCHES[:searches]]
    phrases += [rng.choice(_ANSWER)] if searches else [rng.choice(_AT_ONCE), "stop"]
    return "first " + ", then ".join(phrases) + "."


def vague_skill(rng: random.Random) -> str:
    """A well-formed skill that does not say what to do."""
    return rng.choice(VAGUE_SKILLS) + "."


def skill_reply(skill: str, searches: int | None) -> str:
    """The JSON a skill writer returns; `searches` is the plan that the skill tells, if any."""
    summary = "general advice" if searches is None else _NUMBERS[searches]
    return json.dumps({"summary": summary, "skill": skill})
