"""What the household engine says, word for word: the grammar of the wheel the driver was written for.

Every function returns the text after the action has been carried out, as the engine does. Lists name things in the
order of their ids, not of their numbers ("a mug 2, and a mug 1").
"""

from __future__ import annotations

from collections.abc import Sequence

from data.household.world import Action, HouseholdWorld

NOTHING_HAPPENS = "Nothing happens."

_HELP = """Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""

# The first row whose marks all hold decides (the order of the engine's grammar; "cold" appears only alone).
_CONDITIONS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("isclean", "ishot", "issliced"), "hot and clean sliced"),
    (("isclean", "iscool", "issliced"), "cool and clean sliced"),
    (("isclean", "issliced"), "clean sliced"),
    (("ishot", "issliced"), "hot sliced"),
    (("iscool", "issliced"), "cool sliced"),
    (("isclean", "ishot"), "hot and clean"),
    (("isclean", "iscool"), "cool and clean"),
    (("ishot",), "hot"),
    (("isclean",), "clean"),
    (("iscool",), "cold"),
)


def introduction(world: HouseholdWorld, task_text: str) -> str:
    """The text of a game's start: banner, the room, the task."""
    here = world.receptacles_here()
    if here:
        room = _surroundings(world)
    else:
        room = _middle_of_room(world, world.problem.receptacles)
    return f"-= Welcome to TextWorld, ALFRED! =-\n\n{room}\n\nYour task is to: {task_text}."


def feedback(world: HouseholdWorld, action: Action) -> str:
    """The answer to an action that `world` has just carried out."""
    kind, names = action.kind, world.problem.names
    if kind == "look":
        # Asked during the game the grammar looks for receptacles at the agent's own spot, so it finds none in mid-room.
        return _surroundings(world) if world.receptacles_here() else _middle_of_room(world, ())
    if kind == "inventory":
        return _inventory(world)
    if kind == "help":
        return _HELP
    first, second = names[action.first], names.get(action.second, "")
    if kind == "goto":
        return f"You arrive at {first}. {_inside(world, action.first)}"
    if kind == "open":
        return f"You open the {first}. {_inside(world, action.first)}"
    if kind == "close":
        return f"You close the {first}."
    if kind == "take":
        return f"You pick up the {first} from the {second}."
    if kind == "put":
        return f"You move the {first} to the {second}."
    if kind in ("clean", "heat", "cool"):
        return f"You {kind} the {first} using the {second}."
    if kind == "use":
        return f"You turn on the {first}."
    if kind == "slice":
        return f"You sliced the {first} with the {second}."
    return _inside(world, action.first) if kind == "examine_receptacle" else _examined(world, action.first)


def _surroundings(world: HouseholdWorld) -> str:
    facing = _join([world.problem.names[receptacle] for receptacle in world.receptacles_here()])
    return f"You are facing the {facing}. Next to it, you see {_listing(world, world.things_beside())}."


def _middle_of_room(world: HouseholdWorld, receptacles: Sequence[str]) -> str:
    seen = _listing(world, receptacles)
    return f"You are in the middle of a room. Looking quickly around you, you see {seen}."


def _inventory(world: HouseholdWorld) -> str:
    if not world.hands_full:
        return "You are not carrying anything."
    return f"You are carrying: {_listing(world, sorted(world.held))}."


def _inside(world: HouseholdWorld, receptacle: str) -> str:
    name = world.problem.names[receptacle]
    if world.is_shut(receptacle):
        return f"The {name} is closed."
    seen = _listing(world, world.things_in(receptacle))
    if receptacle in world.problem.members["openable"]:
        return f"The {name} is open. In it, you see {seen}."
    return f"On the {name}, you see {seen}."


def _examined(world: HouseholdWorld, thing: str) -> str:
    problem, name = world.problem, world.problem.names[thing]
    if thing in problem.members["isreceptacleobject"]:
        return f"This is a normal {name}. In it, you see {_listing(world, problem.inner_objects.get(thing, ()))}."
    for marks, words in _CONDITIONS:
        if all(thing in world.marks[mark] for mark in marks):
            return f"This is a {words} {name}."
    if thing in problem.members["toggleable"] and thing in world.marks["istoggled"]:
        return f"This {name} is on."
    if thing in problem.members["sliceable"] and thing in world.marks["issliced"]:
        return f"This is a sliced {name}."
    return f"There's nothing special about {name}."


def _listing(world: HouseholdWorld, things: Sequence[str]) -> str:
    """`a x, a y, and a z`, or `nothing`."""
    return _join([f"a {world.problem.names[thing]}" for thing in things]) if things else "nothing"


def _join(items: Sequence[str]) -> str:
    """
    >>> _join(["a pen 1"]), _join(["a pen 1", "a mug 1"]), _join(["a pen 1", "a mug 2", "a mug 1"])
    ('a pen 1', 'a pen 1, and a mug 1', 'a pen 1, a mug 2, and a mug 1')
    """
    return ", and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))
