"""What articles state about each other, and what questions ask: relations, chains of them, and their wording.

A relation is stated by an anchor, two words right before the value (`born in North Ashwick`), in every article alike. A
chain starts at the subject of a question and follows one relation (one hop) or two; the end of the last is the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from data.search.names import EVENT, PERSON, PLACE, WORK


@dataclass(frozen=True)
class Relation:
    """`subject` and `value` are kinds of entities; `anchor` stands right before the value in the subject's article.

    `of` names the value from the subject (`the author of {}`), or is None where no question goes on from there;
    `asks` are the wordings of a question for the value."""

    subject: str
    anchor: str
    value: str
    asks: tuple[str, ...]
    of: str | None = None


RELATIONS: tuple[Relation, ...] = (
    Relation(PERSON, "born in", PLACE, ("Where was {} born?", "In which place was {} born?")),
    Relation(PERSON, "died in", PLACE, ("Where did {} die?", "In which place did {} die?")),
    Relation(PERSON, "taught by", PERSON, ("Who taught {}?", "Who was the teacher of {}?")),
    Relation(PLACE, "founded by", PERSON, ("Who founded {}?", "Who was the founder of {}?")),
    Relation(PLACE, "governed by", PERSON, ("Who governs {}?", "Who is the governor of {}?")),
    Relation(WORK, "written by", PERSON, ("Who wrote {}?",), "the author of {}"),
    Relation(WORK, "translated by", PERSON, ("Who translated {}?",), "the translator of {}"),
    Relation(EVENT, "held in", PLACE, ("Where was {} held?",), "the host of the {}"),
    Relation(EVENT, "won by", PERSON, ("Who won {}?",), "the winner of the {}"),
)
BY_ANCHOR = {relation.anchor: relation for relation in RELATIONS}

Chain = tuple[Relation, ...]

PEOPLE, PLACES, WORKS, EVENTS = DATA_SETS = ("gen-people", "gen-places", "gen-works", "gen-events")
HOPS = {PEOPLE: 1, PLACES: 1, WORKS: 2, EVENTS: 2}
_SUBJECT = {PEOPLE: PERSON, PLACES: PLACE, WORKS: WORK, EVENTS: EVENT}


def relations_of(kind: str) -> tuple[Relation, ...]:
    """What an article of a kind states, in a fixed order.

    >>> [relation.anchor for relation in relations_of("work")]
    ['written by', 'translated by']
    """
    return tuple(relation for relation in RELATIONS if relation.subject == kind)


def chains(data_set: str) -> tuple[Chain, ...]:
    """The chains that a data set asks about.

    >>> [" > ".join(relation.anchor for relation in chain) for chain in chains("gen-places")]
    ['founded by', 'governed by']
    """
    first = relations_of(_SUBJECT[data_set])
    if HOPS[data_set] == 1:
        return tuple((relation,) for relation in first)
    return tuple((one, two) for one in first for two in relations_of(one.value))


def question_text(chain: Chain, subject: str, wording: int) -> str:
    """The question for the end of `chain` from `subject`; `wording` chooses among the last relation's.

    >>> question_text(chains("gen-works")[0], "The Silver Garden", 0)
    'Where was the author of The Silver Garden born?'
    """
    name = subject
    for relation in chain[:-1]:
        assert relation.of is not None
        name = relation.of.format(name)
    asks = chain[-1].asks
    return asks[wording % len(asks)].format(name)
