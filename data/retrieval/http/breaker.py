"""A circuit breaker: once a server has failed through all retries, nobody waits for it again for a while.

Without it a server that is down would cost queries x retries; with it, one request's retries, and then one attempt after
each pause.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from data.retrieval import RetrievalFault

ERRORS_IN_A_ROW = 3


@dataclass(frozen=True)
class Permit:
    """Leave to send one request. A `probe` is the one request that tries whether the server is back: no retries."""

    successes: int
    probe: bool


class CircuitBreaker:
    """Closed while requests succeed; opened by a failure; half open after `pause_seconds`, when one request may try.

    A request that fails while others succeed says something about itself, not about the server: it opens nothing. Nor does
    one that the server answers with an error, until `ERRORS_IN_A_ROW` did. Thread safe; `clock` gives seconds. Every permit
    must end with `succeeded`, `failed` or `abandoned`.
    """

    def __init__(self, pause_seconds: float, clock: Callable[[], float]) -> None:
        self._pause_seconds, self._clock = pause_seconds, clock
        self._lock = threading.Lock()
        self._fault: RetrievalFault | None = None
        self._probe_at = 0.0
        self._probing = False
        self._successes = self._errors = 0

    def ask(self) -> Permit | RetrievalFault:
        """Leave to send a request, or the fault that opened the circuit."""
        with self._lock:
            if self._fault is None:
                return Permit(self._successes, probe=False)
            if self._probing or self._clock() < self._probe_at:
                return self._fault
            self._probing = True
            return Permit(self._successes, probe=True)

    def opened(self, permit: Permit) -> RetrievalFault | None:
        """The fault that opened the circuit while the request with this permit was waiting; None for the probe."""
        with self._lock:
            return None if permit.probe else self._fault

    def succeeded(self, permit: Permit) -> None:
        """The server works, whether or not it liked the request."""
        with self._lock:
            self._successes += 1
            self._errors = 0
            self._fault = None
            self._probing = self._probing and not permit.probe

    def failed(self, permit: Permit, fault: RetrievalFault, *, answered: bool) -> None:
        """The request failed through all its attempts; `answered`: with an error from the server, not with silence."""
        with self._lock:
            self._errors += 1
            is_down = not answered or permit.probe or self._errors >= ERRORS_IN_A_ROW
            if is_down and self._successes == permit.successes:
                self._fault = fault
                self._probe_at = self._clock() + self._pause_seconds
            self._probing = self._probing and not permit.probe

    def abandoned(self, permit: Permit) -> None:
        """The request ended without saying anything about the server."""
        with self._lock:
            self._probing = self._probing and not permit.probe
