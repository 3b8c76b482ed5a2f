"""Running figures of a stage that plays episodes: success so far and tokens per second, for the screen alone."""

from __future__ import annotations

import time
from collections.abc import Callable

from data.progress import Reporter


class EpisodeProgress:
    """A reporter around another one: turns the counts of each batch of episodes into figures of the whole stage."""

    def __init__(self, reporter: Reporter, clock: Callable[[], float] = time.perf_counter) -> None:
        self._reporter, self._clock = reporter, clock
        self._start = clock()
        self._played = self._won = self._tokens = 0

    def stage(self, name: str, total: int | None, unit: str) -> None:
        """Begin counting anew."""
        self._start = self._clock()
        self._played = self._won = self._tokens = 0
        self._reporter.stage(name, total, unit)

    def advance(self, n: int = 1, **fields: object) -> None:
        """`n` more episodes; with `won` and `tokens` they were played now, without they were found on disk."""
        if "won" not in fields:
            self._reporter.advance(n, **fields)
            return
        self._played += n
        self._won += int(str(fields.pop("won")))
        self._tokens += int(str(fields.pop("tokens", 0)))
        seconds = max(self._clock() - self._start, 1e-9)
        figures = {"success": f"{self._won / self._played:.1%}", "tokens_per_second": round(self._tokens / seconds)}
        self._reporter.advance(n, **figures, **fields)

    def note(self, text: str) -> None:
        """Passed on."""
        self._reporter.note(text)

    def done(self) -> None:
        """Passed on."""
        self._reporter.done()
