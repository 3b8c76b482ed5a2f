"""The text of an article: two to four short sentences that state its relations, with changing order and filling."""

from __future__ import annotations

import random
from collections.abc import Mapping

from data.search.names import EVENT, PERSON, PLACE, WORK

_QUALITIES = ("careful", "famous", "gifted", "humble", "popular", "restless", "stubborn", "well known")
_LEADS = {
    PERSON: ("{name} was a {quality} {noun}.", "{name} worked as a {quality} {noun} for many years."),
    PLACE: ("{name} is a {quality} {noun}.", "{name} is a {quality} {noun} with an old market."),
    WORK: ("{name} is a {quality} {noun}.", "{name} is a {quality} {noun} in three parts."),
    EVENT: ("{name} was a {quality} {noun}.", "{name} was a {quality} {noun} that lasted nine days."),
}
_NOUNS = {
    PERSON: ("baker", "doctor", "engineer", "merchant", "painter", "poet", "sailor", "singer"),
    PLACE: ("town", "village", "port", "city"),
    WORK: ("novel", "poem", "play", "ballad"),
    EVENT: ("contest", "meeting", "race", "gathering"),
}
_FILLING = {
    PERSON: (
        "Some letters of {name} are kept in a small archive.",
        "The house of {name} is a museum today.",
        "A street was named after {name} much later.",
        "Little else is known about {name}.",
    ),
    PLACE: (
        "Most people of {name} live from fishing.",
        "A long wall stands around {name}.",
        "Many roads lead from {name} to the coast.",
        "In spring the fields near {name} are flooded.",
    ),
    WORK: (
        "Only two copies of {name} are left.",
        "Schools still read {name} every year.",
        "The first print of {name} was sold in a week.",
        "Critics did not like {name} at first.",
    ),
    EVENT: (
        "A large crowd came to see {name}.",
        "No further {name} has taken place.",
        "Heavy rain nearly ended {name} on the second day.",
        "Old songs tell of {name}.",
    ),
}
_PRONOUNS = {PERSON: ("He", "She"), PLACE: ("It",), WORK: ("It",), EVENT: ("It",)}


def article_text(name: str, kind: str, facts: Mapping[str, str], rng: random.Random) -> str:
    """The text of one article; `facts` maps anchors (`born in`) to the values they stand before."""
    lead = rng.choice(_LEADS[kind]).format(name=name, quality=rng.choice(_QUALITIES), noun=rng.choice(_NOUNS[kind]))
    stated = [f"{_verb(anchor)}{anchor} {value}" for anchor, value in facts.items()]
    rng.shuffle(stated)
    split = rng.randrange(1, len(stated) + 1)
    subjects = [name, rng.choice(_PRONOUNS[kind])]
    rng.shuffle(subjects)
    parts = [part for part in (stated[:split], stated[split:]) if part]
    told = [f"{subject} {_listed(part)}." for subject, part in zip(subjects, parts, strict=False)]
    return " ".join([lead, *told, rng.choice(_FILLING[kind]).format(name=name)])


def _verb(anchor: str) -> str:
    if anchor.startswith("died"):
        return ""
    return "is " if anchor.startswith("governed") else "was "


def _listed(clauses: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(clauses[:-1]), clauses[-1]] if len(clauses) > 1 else clauses)
