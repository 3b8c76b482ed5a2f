"""Choosing a part of a composed object by name: a registry with an import-string plug-in point.

A user's own class is named `package.module:Class` and needs no registration. Whoever builds a part passes plain values;
an unknown name or option is refused with the nearest known one.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from schemas.errors import ConfigError

Part = TypeVar("Part")
Class = TypeVar("Class", bound=type)


class Registry(Generic[Part]):
    """Classes of one kind of part by name; `kind` is the noun in error messages, `members` what every part must have."""

    def __init__(self, kind: str, members: Sequence[str] = ()) -> None:
        self.kind, self.members = kind, tuple(members)
        self._classes: dict[str, type] = {}

    def register(self, name: str) -> Callable[[Class], Class]:
        """Class decorator: make the class known as `name`. Raises ValueError for a name already taken."""

        def remember(part: Class) -> Class:
            if name in self._classes:
                raise ValueError(f"{self.kind} {name!r} is already registered")
            self._classes[name] = part
            return part

        return remember

    def names(self) -> tuple[str, ...]:
        """Registered names, sorted."""
        return tuple(sorted(self._classes))

    def build(self, name: str, options: Mapping[str, Any]) -> Part:
        """An instance of the class registered or importable as `name`, made with `options`.

        Raises ConfigError if that fails or if the instance lacks one of the members that parts of this kind have.
        """
        part = self._imported(name) if ":" in name else self._registered(name)
        known = list(inspect.signature(part).parameters)
        unknown = [option for option in options if option not in known]
        if unknown:
            raise ConfigError(
                f"unknown option {unknown[0]!r} of the {self.kind} {name!r}",
                expected="one of " + ", ".join(known) if known else "no option",
                remedy=_nearest(unknown[0], known),
            )
        try:
            made = part(**options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the {self.kind} {name!r} refuses its options", found=error) from error
        if missing := [member for member in self.members if not hasattr(made, member)]:
            raise ConfigError(
                f"{name!r} is no {self.kind}",
                expected="a class with " + " and ".join(self.members),
                found=f"one without {missing[0]}",
            )
        return made

    def _registered(self, name: str) -> type:
        if name not in self._classes:
            raise ConfigError(
                f"unknown {self.kind} {name!r}",
                expected="one of " + ", ".join(self.names()) + ", or package.module:Class",
                remedy=_nearest(name, list(self.names())),
            )
        return self._classes[name]

    def _imported(self, name: str) -> type:
        module, _, attribute = name.partition(":")
        try:
            part = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"cannot import the {self.kind} {name!r}",
                expected="package.module:Class on the Python path",
                found=error,
            ) from error
        if not callable(part):
            raise ConfigError(f"the {self.kind} {name!r} is not a class", found=type(part).__name__)
        return part


def _nearest(word: str, known: list[str]) -> str | None:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else None
