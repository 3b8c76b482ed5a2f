"""The training text of the bundled household policy: episodes of the scripted player on generated games.

Example `index` of a corpus follows from (seed, index) alone. Five kinds of example are mixed: episodes without a skill,
whose plan is right in `GOOD_SHARE` of them only; episodes with a skill, whose plan is whatever the skill says; episodes with a
skill that says nothing, played like those without; (finished episode -> skill) pairs, good and poor ones mixed; and drills, short questions about what stands in a
text (is it there, which number, what comes next), since grounding is what a small model learns last. Two kinds
of change keep the model from memorising: objects and receptacles are renamed in part of the examples, and wrong turns
are put in (without loss) so that recovery is shown too.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache

from data.environments import Observation, Turn
from data.household.catalog import TASK_TYPES, catalog
from data.household.demonstrator import GOOD_PLANS, TOOLS, Demonstrator, Plan, bad_plans
from data.household.driver import HouseholdSession
from data.household.generator import generate_task
from data.household.skill_texts import skill_reply, skill_text, vague_skill
from data.policies.conversations import Conversation, Message
from data.prompts.household import CompactPrompts
from data.seeds import derive_seed
from data.tasks import Task

GOOD_SHARE = 0.4  # right plans among episodes without a skill: what the student starts from
EXAMPLES_PER_GAME = 3
MAX_TURNS = 24
IDLE_TURNS = 2  # shown after a plan is used up without a win
WRONG_TURN_SHARE = 0.3  # episodes with wrong turns put in
RENAMED_SHARE = 0.6
DRILL_SHARE = 0.25
DRILL_QUESTIONS = 8
KEPT_NAMES = frozenset({*TOOLS.values(), "desklamp"})  # the tools' names carry meaning


def example(seed: int, index: int, *, size: str = "small", split: str = "train") -> Conversation:
    """The conversation number `index`."""
    rng = random.Random(derive_seed(seed, "corpus", index))
    game = index // EXAMPLES_PER_GAME
    task_type = TASK_TYPES[game % len(TASK_TYPES)]
    task = generate_task(derive_seed(seed, "games") % 2**31, game, task_type=task_type, size=size, split=split)
    draw = rng.random()
    if draw < 0.12:
        conversation = _skill_pair(task, rng)
    elif rng.random() < DRILL_SHARE:
        conversation = _drill(task, rng)
    else:
        skill, plan = _skill_and_plan(task, rng, with_skill=draw > 0.55)
        conversation, _, _, _ = _episode(task, plan, skill, rng)
    return _renamed(conversation, rng) if rng.random() < RENAMED_SHARE else conversation


def _skill_and_plan(task: Task, rng: random.Random, *, with_skill: bool) -> tuple[str | None, Plan]:
    if not with_skill:
        return None, unaided_plan(task, rng)
    draw = rng.random()
    if draw < 0.15:
        return vague_skill(rng), unaided_plan(task, rng)
    wrong = bad_plans(task.task_type, tuple(TOOLS) if draw > 0.8 else ())
    plan = GOOD_PLANS[task.task_type] if draw < 0.6 else rng.choice(wrong)
    return skill_text(plan, rng), plan


def unaided_plan(task: Task, rng: random.Random) -> Plan:
    """The plan of an episode without a useful skill: right in `GOOD_SHARE` of the draws."""
    if rng.random() < GOOD_SHARE:
        return GOOD_PLANS[task.task_type]
    return rng.choice(bad_plans(task.task_type))


def _episode(
    task: Task, plan: Plan, skill: str | None, rng: random.Random
) -> tuple[Conversation, list[Turn], Observation, bool]:
    prompts, session = CompactPrompts(), HouseholdSession(task, "corpus")
    params = task.payload["pddl_params"]
    player = Demonstrator(params["object_target"].lower(), params["parent_target"].lower(), plan)
    observation = session.first_observation
    conversation = [Message("user", prompts.opening(task, observation, skill), False)]
    turns: list[Turn] = []
    wrong_turns = {rng.randrange(1, 10) for _ in range(2)} if rng.random() < WRONG_TURN_SHARE else set()
    idle, won = 0, False
    while len(turns) < MAX_TURNS and idle < IDLE_TURNS and not won:
        action = _wrong_action(player, session, observation, rng) if len(turns) in wrong_turns else None
        if action is None:
            thought, action = player.reply(observation.text)
            idle += thought == "done"
            reply, loss = f"<think>{thought}</think><action>{action}</action>", True
        else:
            reply, loss = f"<think>the {player.target}: find</think><action>{action}</action>", False
        result = session.step(action)
        turns.append(Turn(observation.text, reply, action))
        conversation.append(Message("assistant", reply, loss))
        observation, won = result.observation, result.won
        if not won:
            conversation.append(Message("user", prompts.follow_up(observation), False))
    if conversation[-1].role == "user":
        conversation.pop()
    return conversation, turns, observation, won


def _wrong_action(
    player: Demonstrator, session: HouseholdSession, observation: Observation, rng: random.Random
) -> str | None:
    """A step the player did not want: a trip somewhere else, or a command that the world refuses."""
    if rng.random() < 0.4:
        trips = [command for command in observation.admissible_commands if command.startswith("go to ")]
        action = rng.choice(trips)
        player.foresee(action)
        return action
    command = rng.choice(observation.admissible_commands)
    action = re.sub(r"\d+", lambda _: str(rng.randrange(1, 10)), command)
    return None if action in observation.admissible_commands else action


def _skill_pair(task: Task, rng: random.Random) -> Conversation:
    plan = GOOD_PLANS[task.task_type] if rng.random() < 0.5 else rng.choice(bad_plans(task.task_type))
    _, turns, final, won = _episode(task, plan, None, rng)
    draw = rng.random()
    described: Plan | None = GOOD_PLANS[task.task_type]
    if won and draw > 0.75 or not won and draw > 0.8:
        described = None
    elif not won and draw > 0.5:
        described = rng.choice(bad_plans(task.task_type, tuple(TOOLS)))
    skill = skill_text(described, rng) if described else vague_skill(rng)
    return [
        Message("user", CompactPrompts().skill_request(task, turns, final, won), False),
        Message("assistant", skill_reply(skill, described), True),
    ]


def _drill(task: Task, rng: random.Random) -> Conversation:
    """Questions about a room and a few receptacles in it, each answered as an episode's replies would put it."""
    objects, _ = _class_names()
    session = HouseholdSession(task, "corpus")
    rooms = [f"{name} {number}" for name, number in _ENTITY_SEEN.findall(session.first_observation.text)]
    lines, seen = [CompactPrompts().opening(task, session.first_observation, None).splitlines()[-1]], {}
    for receptacle in rng.sample(rooms, min(len(rooms), rng.randrange(1, 5))):
        text = session.step(f"go to {receptacle}").observation.text
        if text.endswith("is closed."):
            text = session.step(f"open {receptacle}").observation.text
        lines.append(text)
        for name, number in _ENTITY_SEEN.findall(text):
            seen.setdefault(name, f"{name} {number}")
    conversation: Conversation = []
    for _ in range(DRILL_QUESTIONS):
        kind = rng.random()
        if kind < 0.3:
            place = rng.randrange(len(rooms) - 1)
            question, answer = f"after the {rooms[place]}?", f"<action>go to {rooms[place + 1]}</action>"
        elif kind < 0.45:
            name = rng.choice(rooms).split(" ")[0]
            first = next(receptacle for receptacle in rooms if receptacle.split(" ")[0] == name)
            question, answer = f"to the {name}?", f"<action>go to {first}</action>"
        else:
            name = rng.choice(sorted(seen)) if seen and rng.random() < 0.5 else rng.choice(objects)
            thought = f"the {seen[name]}: take" if name in seen else f"the {name}: find"
            question, answer = f"the {name}?", f"<think>{thought}</think>"
        lines.append(question)
        conversation += [Message("user", "\n".join(lines), False), Message("assistant", answer, True)]
        lines = []
    return conversation


_ENTITY_SEEN = re.compile(r"\ba ([a-z]+) (\d+)")
_ENTITY = re.compile(r"\b([a-z]+) (\d+)\b")


def _renamed(conversation: Conversation, rng: random.Random) -> Conversation:
    """The same conversation in a world whose classes and numbers have other names (tools and lamps keep theirs)."""
    objects, receptacles = _class_names()
    text = " ".join(message.content for message in conversation)
    entities = sorted(set(_ENTITY.findall(text)))
    used = sorted(set(re.findall(r"[a-z]+", text)))  # named without a number too: a new name must not be taken already
    names = _injection([n for n in used if n in objects], objects, rng)
    names |= _injection([n for n in used if n in receptacles], receptacles, rng)
    numbers: dict[tuple[str, str], str] = {}
    for name in sorted({name for name, _ in entities}):
        own = [number for entity, number in entities if entity == name]
        drawn = rng.sample(range(1, max(10, len(own) + 4)), len(own))
        numbers |= {(name, number): str(new) for number, new in zip(own, drawn, strict=True)}

    def entity(match: re.Match[str]) -> str:
        name, number = match.groups()
        return f"{names.get(name, name)} {numbers.get((name, number), number)}"

    def word(match: re.Match[str]) -> str:
        return names.get(match.group(), match.group())

    def rename(content: str) -> str:
        # Entities first, with their new words hidden from the pass over single words (task line, thoughts).
        pieces, last = [], 0
        for match in _ENTITY.finditer(content):
            pieces += [re.sub(r"[a-z]+", word, content[last : match.start()]), entity(match)]
            last = match.end()
        return "".join([*pieces, re.sub(r"[a-z]+", word, content[last:])])

    return [Message(m.role, rename(m.content), m.loss) for m in conversation]


def _injection(used: list[str], pool: list[str], rng: random.Random) -> dict[str, str]:
    return dict(zip(used, rng.sample(pool, len(used)), strict=True))


@lru_cache(maxsize=1)
def _class_names() -> tuple[list[str], list[str]]:
    """Lower-case object and receptacle classes that may be renamed, each a sorted list, disjoint."""
    known = catalog()
    receptacles = {name.lower() for name in known.contents} - KEPT_NAMES
    objects = {name.lower() for held in known.contents.values() for name in held} - KEPT_NAMES - receptacles
    return sorted(objects), sorted(receptacles)
