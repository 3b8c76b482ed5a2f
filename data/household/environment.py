"""The household environment: ALFWorld's own text games, behind `data.environments.Environment`.

`driver = "fast"` plays them with our own driver (`data.household.driver`), `driver = "stock"` with the stock engine.
Both give the same text, admissible commands and outcome; their version strings differ, so episodes of one are never
taken for episodes of the other.
"""

from __future__ import annotations

from data.environments import ParsedReply, Prompts, Session
from data.household.driver import DRIVER_REVISION, HouseholdSession
from data.household.edition import check_edition, engine_version
from data.household.replies import parse_reply
from data.household.stock import STOCK_REVISION, StockSession
from data.prompts.household import CompactPrompts, StandardPrompts
from data.tasks import Panel, Task
from schemas.errors import ConfigError

DRIVERS = ("fast", "stock")
PROMPTS: dict[str, type[StandardPrompts] | type[CompactPrompts]] = {
    "standard": StandardPrompts,
    "compact": CompactPrompts,
}


class HouseholdEnvironment:
    """Factory of household sessions.

    Options (`env.options.*`): `driver` "fast" or "stock"; `reset_timeout_seconds` and `step_timeout_seconds`, wall
    clock, checked after the call; `prompts` "standard" (instruction-tuned models) or "compact" (the bundled small
    policy). Raises ConfigError for other values.
    """

    name = "household"

    def __init__(
        self,
        driver: str = "fast",
        reset_timeout_seconds: float = 30.0,
        step_timeout_seconds: float = 10.0,
        prompts: str = "standard",
    ) -> None:
        _expect_one_of("driver", driver, DRIVERS)
        _expect_one_of("prompts", prompts, tuple(PROMPTS))
        _expect_positive("reset_timeout_seconds", reset_timeout_seconds)
        _expect_positive("step_timeout_seconds", step_timeout_seconds)
        self.driver = driver
        self.prompts: Prompts = PROMPTS[prompts]()
        self.version = engine_version(driver, DRIVER_REVISION if driver == "fast" else STOCK_REVISION)
        self._limits = {
            "reset_timeout_seconds": float(reset_timeout_seconds),
            "step_timeout_seconds": float(step_timeout_seconds),
        }
        self._edition_checked = False

    def start(self, task: Task) -> Session:
        """Begin the task's game from its very beginning.

        Raises EnvironmentFault (wrong edition of the engine, time-out, a game the stock engine refuses) or
        ArtifactError (a malformed game).
        """
        if self.driver == "stock":
            return StockSession(task, self.version, **self._limits)
        if not self._edition_checked:
            check_edition()
            self._edition_checked = True
        return HouseholdSession(task, self.version, **self._limits)

    def parse_reply(self, text: str, *, cut: bool) -> ParsedReply:
        """See `data.household.replies.parse_reply`."""
        return parse_reply(text, cut=cut)

    def panel(self, source: str, *, limit: int | None = None) -> Panel:
        """Load a panel of games; see `data.household.panels.load_panel`."""
        from data.household.panels import load_panel

        return load_panel(source, limit=limit)


def _expect_one_of(option: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            "an environment option has an unknown value",
            where=f"env.options.{option}",
            expected=" or ".join(choices),
            found=repr(value),
        )


def _expect_positive(option: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(
            "a time-out must be a positive number of seconds", where=f"env.options.{option}", found=repr(value)
        )
