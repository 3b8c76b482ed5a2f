"""The error vocabulary: one root, one class per boundary, each with its exit code.

Every message says what went wrong, where, what was expected, what was found and what to do next; the command line prints
it as one sentence and exits with `exit_code`. A failed episode is not an error: it is a row with a reason.
"""

from __future__ import annotations


class RsipoError(Exception):
    """Root of every error a user is meant to read. `exit_code` 1: the run failed."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: object | None = None,
        found: object | None = None,
        remedy: str | None = None,
    ) -> None:
        self.what, self.where, self.expected, self.found, self.remedy = what, where, expected, found, remedy
        super().__init__(self.sentence())

    def sentence(self) -> str:
        """The message as one line: `what (where): expected X, found Y; remedy`.

        >>> RsipoError("value out of range", where="rollout.group_size", expected=">= 2", found=1, remedy="raise it").sentence()
        'value out of range (rollout.group_size): expected >= 2, found 1; raise it'
        """
        text = self.what
        if self.where:
            text += f" ({self.where})"
        details = []
        if self.expected is not None:
            details.append(f"expected {self.expected}")
        if self.found is not None:
            details.append(f"found {self.found}")
        if details:
            text += ": " + ", ".join(details)
        if self.remedy:
            text += f"; {self.remedy}"
        return " ".join(text.split())


class ConfigError(RsipoError):
    """A wrong option, key or value, or arithmetic that cannot work. Exit code 2."""

    exit_code = 2


class ArtifactError(RsipoError):
    """A file or table that is missing, damaged, stale or of another version. Exit code 3."""

    exit_code = 3


class LockError(RsipoError):
    """Another process writes this run directory. Exit code 4."""

    exit_code = 4


class EnvironmentFault(RsipoError):
    """The environment itself could not start or step a task."""


class EnvironmentTimeout(EnvironmentFault):
    """The environment took longer than its wall-clock limit; the episode ends with stop reason `timeout`."""


class EngineError(RsipoError):
    """The generation engine failed, or serves other weights than it should."""


class LearnerError(RsipoError):
    """The training process failed or could not be launched."""


class NumericsError(RsipoError):
    """A loss, gradient or statistic that is not finite, or a loss that reaches no token."""
