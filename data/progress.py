"""Where long work says how far it is: the protocol behind the bars of the command line, and one that says nothing."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Where a stage says how far it is. Texts may come from models: showing them safely is the reporter's duty."""

    def stage(self, name: str, total: int | None, unit: str) -> None:
        """A stage begins, with `total` units of work (None when unknown)."""

    def advance(self, n: int = 1, **fields: object) -> None:
        """`n` more units are done; `fields` replace the figures shown beside the bar."""

    def note(self, text: str) -> None:
        """One line that stays."""

    def done(self) -> None:
        """The stage has ended."""


class SilentReporter:
    """Says nothing."""

    def stage(self, name: str, total: int | None, unit: str) -> None:
        pass

    def advance(self, n: int = 1, **fields: object) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def done(self) -> None:
        pass
