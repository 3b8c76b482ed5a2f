"""What the panels of every environment share: the options of a source string, and the first tasks of a panel.

A source is a string, `kind:name=value,name=value`; which kinds there are and what their options mean is the environment's.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Collection, Mapping

from data.tasks import Panel, Task
from schemas.errors import ConfigError

GENERATED = "generated:"


def parse_options(
    text: str,
    source: str,
    *,
    defaults: Mapping[str, str],
    optional: Collection[str] = (),
    required: Collection[str] = (),
    what: str = "a generated panel",
    example: str,
) -> dict[str, str]:
    """The options `name=value,name=value` of a source, defaults filled in; options of `optional` may be absent.

    Raises ConfigError naming `source` and the option at fault: unknown (with the nearest name), empty, given twice, or
    required and missing.
    """
    known = (*defaults, *required, *optional)
    options: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in known:
            raise _unknown_option(name, known, source, what, example)
        if not equals or not value:
            raise ConfigError(f"the option {name} has no value", where=source, expected=f"{name}=...", found=repr(part))
        if name in options:
            raise ConfigError(f"the option {name} is given twice", where=source)
        options[name] = value
    for name in required:
        if name not in options:
            raise ConfigError(
                f"the option {name} is missing", where=source, expected=f"{name}=...", remedy=f"as in {example}"
            )
    return {**defaults, **options}


def _unknown_option(name: str, known: Collection[str], source: str, what: str, example: str) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1)
    return ConfigError(
        f"unknown option of {what}",
        where=source,
        expected=f"one of {', '.join(known)}",
        found=repr(name),
        remedy=f"did you mean {near[0]}?" if near else f"for example {example}",
    )


def whole_number(text: str, name: str, source: str) -> int:
    """The whole number >= 0 that an option holds. Raises ConfigError naming the option and its source."""
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is not a number", where=source, expected="a whole number >= 0", found=repr(text))
    return int(text)


def limit_panel(panel: Panel, limit: int, *, spread: bool = False) -> Panel:
    """The first `limit` tasks of a panel (all when it has fewer); with `spread`, one of each type in turn."""
    if isinstance(limit, bool) or limit < 1:
        raise ConfigError("a panel needs a task", where="limit", expected=">= 1", found=limit)
    tasks = list(panel.tasks)
    if spread:
        by_type: dict[str, list[Task]] = defaultdict(list)
        for task in tasks:
            by_type[task.task_type].append(task)
        turns = [(turn, kind, task) for kind in by_type for turn, task in enumerate(by_type[kind])]
        tasks = [task for _, _, task in sorted(turns, key=lambda entry: entry[:2])]
    return Panel.of(panel.name, tasks[:limit])
