"""Reading the skill a policy wrote: JSON with `summary` and `skill`, however untidily it was put down.

Accepted are a bare object, one in a code fence or inside other text, trailing commas, raw line breaks and unescaped quotes
inside strings, and the plain form `summary: ... skill: ...` that very small models write. A reply that was cut has no skill:
its end, which may take back what it said, is missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_MISSING = frozenset({"none", "nan", "null", "n/a"})
_TRAILING_COMMA = re.compile(r",(\s*[}\]])")
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_FIELD = r'["\'*]*{name}["\'*]*\s*[:=]\s*'
_PLAIN = re.compile(
    r"(?:^|[\s{,>])summary\s*[:=](?P<summary>.*?)(?:^|[\s,]+)skill\s*[:=](?P<skill>.*)\Z", re.DOTALL | re.I
)
_LOOSE = re.compile(
    r"\{\s*"
    + _FIELD.format(name="summary")
    + r'"(?P<summary>.*?)"\s*,\s*'
    + _FIELD.format(name="skill")
    + r'"(?P<skill>.*)"\s*,?\s*\}',
    re.DOTALL | re.I,
)


@dataclass(frozen=True)
class ParsedSkill:
    """A skill and its summary, or the reason why there is none: `no_json`, `empty`, `too_short` or `length`."""

    summary: str | None
    skill: str | None
    reason: str | None


def parse_skill(text: str, *, cut: bool, min_words: int) -> ParsedSkill:
    """Read a written skill (method section 4). `cut`: the length limit ended the reply; `min_words`: shortest skill.

    >>> parse_skill('{"summary": "s", "skill": "first find the mug, then heat it"}', cut=False, min_words=5).skill
    'first find the mug, then heat it'
    >>> parse_skill('{"summary": "s", "skill": "look around"}', cut=False, min_words=5).reason
    'too_short'
    """
    if cut:
        return ParsedSkill(None, None, "length")
    found = _fields(_THOUGHT.sub("", text))
    if found is None:
        return ParsedSkill(None, None, "no_json")
    summary, skill = _tidy(found.get("summary")), _tidy(found.get("skill"))
    if skill is None:
        return ParsedSkill(summary, None, "empty")
    if len(skill.split()) < min_words:
        return ParsedSkill(summary, None, "too_short")
    return ParsedSkill(summary, skill, None)


def _fields(text: str) -> dict[str, Any] | None:
    """The first object of `text` that has a `skill`, with lower-case keys; None when there is none in any form."""
    for candidate in _objects(text):
        for attempt in (candidate, _TRAILING_COMMA.sub(r"\1", candidate)):
            try:
                value = json.loads(attempt, strict=False)  # strict=False: raw line breaks inside strings
            except (json.JSONDecodeError, RecursionError):
                continue
            if isinstance(value, dict):
                lowered = {str(key).strip().lower(): content for key, content in value.items()}
                if "skill" in lowered:
                    return lowered
    for pattern in (_LOOSE, _PLAIN):
        match = pattern.search(text)
        if match:
            return match.groupdict()
    return None


def _objects(text: str) -> Iterator[str]:
    """Every balanced {...} of `text` from left to right, braces inside of strings not counted."""
    start = text.find("{")
    while start >= 0:
        end = _closing_brace(text, start)
        if end is not None:
            yield text[start : end + 1]
        start = text.find("{", start + 1)


def _closing_brace(text: str, start: int) -> int | None:
    depth, inside, escaped = 0, False, False
    for position in range(start, len(text)):
        character = text[position]
        if inside:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                inside = False
        elif character == '"':
            inside = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
    return None


def _tidy(value: Any) -> str | None:
    """A field as text: steps of a list on lines of their own, outer blanks removed; None when nothing is there."""
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        value = "\n".join(str(item).strip() for item in value)
    if not isinstance(value, str):
        return None
    text = value.strip().strip("`").strip()
    return None if not text or text.lower() in _MISSING else text
