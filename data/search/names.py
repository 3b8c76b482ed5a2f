"""Invented names: inventories of words, and every title of a kind they can form.

People, places, works and events are called by two or three words, each from an inventory of its own, so that many articles
share a word (near-duplicates such as `Ashwick` and `North Ashwick`, or two people of one surname) and no whole name is ever
a single word that a model could know by heart.
"""

from __future__ import annotations

from functools import lru_cache

PERSON, PLACE, WORK, EVENT = "person", "place", "work", "event"
KINDS = (PERSON, PLACE, WORK, EVENT)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_GIVEN_STARTS = _words("Al Ber Cal Dor El Fen Gil Hal Il Jor Kel Lor Mir Nel Or Pel Ros Sel Tam Ver")
_GIVEN_ENDS = _words("a en ia o us in")
_SURNAME_STARTS = _words(
    "Bran Crad Drey Falk Grim Hold Jast Kolb Lund Marr Nord Ost Pett Quar Rusk Stav Thorn Ulm Vald Wend"
)
_SURNAME_ENDS = _words("er man sen ley ow ick ard ell ova ing")
_PLACE_STARTS = _words("Ash Bel Clay Dun Eld Frost Glen Hask Iver Jarn Kings Lin Mar Nor Oak Pen Rav Stan Tol Wex")
_PLACE_ENDS = _words("wick ton ford mouth holm burg dale haven stead vale")
PLACE_PREFIXES = ("", "North", "South", "Upper", "Lower", "Old", "New", "Little", "Great")

ADJECTIVES = _words(
    "Amber Ancient Autumn Azure Bitter Blue Brave Bright Broken Bronze Burning Calm Cedar Clear Clever Cloudy Cold Copper "
    "Coral Crimson Crooked Crystal Curious Dark Deep Distant Drifting Dusty Early Eastern Ebony Emerald Empty Endless "
    "Evening Faded Fallen Fierce First Floating Flying Foggy Forgotten Frozen Gentle Gilded Glass Golden Granite Green "
    "Grey Hidden Hollow Honest Humble Icy Iron Ivory Jade Jolly Kind Late Laughing Lazy Light Lonely Lost Loud Lucky Marble "
    "Midnight Misty Modest Morning Narrow Noble Northern Opal Orange Painted Pale Patient Pearl Plain Polite Proud Purple "
    "Quick Quiet Rapid Restless Rough Royal Ruby Rusty Sacred Sandy Scarlet Secret Shallow Sharp Silent Silver Simple "
    "Singing Sleepy Slow Small Smooth Solemn Southern Spring Steady Stone Stormy Strange Summer"
)
NOUNS = _words(
    "Anchor Apple Arrow Balcony Barn Basket Beacon Bell Bird Boat Book Bottle Bridge Brook Candle Canyon Castle Chair "
    "Chapel Cherry Clock Cloak Coin Corner Cottage Compass Crane Crown Dancer Door Dove Dream Drum Echo Engine Falcon Feather "
    "Fence Ferry Field Flame Flute Forest Fountain Fox Garden Gate Glove Harbour Harp Harvest Hill Horse House Island "
    "Journey Kettle Key Kite Ladder Lake Lamp Lantern Letter Lion Map Meadow Mill Mirror Moon Mountain Needle Oak Ocean "
    "Orchard Owl Palace Path Pilgrim Pillar Raven Ribbon River Road Rose Sailor Shadow Ship Shore Song Sparrow Star "
    "Stranger Sword Table Thread Tower Valley Violin Window Winter"
)
CONTESTS = _words(
    "Regatta Tournament Festival Congress Derby Marathon Rally Jubilee Carnival Contest Parade Assembly Match Trial Fair "
    "Race Games Council Feast Cup"
)


@lru_cache(maxsize=len(KINDS))
def titles(kind: str) -> tuple[str, ...]:
    """Every title that a kind of article can have, in a fixed order; all different, also without case and articles."""
    if kind == PERSON:
        surnames = _joined(_SURNAME_STARTS, _SURNAME_ENDS)
        return tuple(f"{given} {surname}" for given in _joined(_GIVEN_STARTS, _GIVEN_ENDS) for surname in surnames)
    if kind == PLACE:
        stems = _joined(_PLACE_STARTS, _PLACE_ENDS)
        return tuple(f"{prefix} {stem}".strip() for prefix in PLACE_PREFIXES for stem in stems)
    if kind == WORK:
        return tuple(f"The {adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS)
    return tuple(f"{adjective} {contest}" for adjective in ADJECTIVES for contest in CONTESTS)


def name_words() -> list[str]:
    """Every single word that occurs in a title, sorted."""
    return sorted({word for kind in KINDS for title in titles(kind) for word in title.split(" ")})


def _joined(starts: tuple[str, ...], ends: tuple[str, ...]) -> list[str]:
    return [start + end for start in starts for end in ends]
