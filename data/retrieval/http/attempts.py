"""One HTTP request with a bounded number of attempts: time-outs, pauses, size limit, circuit breaker.

Knows nothing of retrieval but its fault: what an answer means is the business of the `read` function it is given.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

import httpx2

from data.retrieval import RetrievalFault
from data.retrieval.http.breaker import CircuitBreaker, Permit
from data.retrieval.http.wire import ShapeError, shown

MAX_RESPONSE_BYTES = 64 * 1024 * 1024
MAX_PAUSE_SECONDS = 30.0  # between two attempts, whatever Retry-After says
BREAKER_PAUSE_SECONDS = 5.0

_BUSY = frozenset({429, 502, 503, 504})
_ABOUT_THE_BODY = {400, 413, 415, 422}  # what servers answer to a body of another variant, or that they cannot take

T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    """A complete HTTP answer; `retry_after` in seconds."""

    status: int
    body: bytes
    location: str | None = None
    retry_after: float | None = None


class Refused(Exception):
    """An answer that asking again would not change; `mismatch` where another body might."""

    def __init__(self, fault: RetrievalFault, *, mismatch: bool) -> None:
        super().__init__(str(fault))
        self.fault, self.mismatch = fault, mismatch


@dataclass(frozen=True)
class Patience:
    """How long and how often: seconds of a whole answer, attempts after the first, first pause in seconds."""

    timeout_seconds: float = 30.0
    retries: int = 3
    retry_wait_seconds: float = 0.5
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep


class _Again(Exception):
    """An attempt that failed and may be repeated; `answered` by the server, after `pause` seconds if it named a time."""

    def __init__(self, fault: RetrievalFault, *, answered: bool = False, pause: float | None = None) -> None:
        super().__init__(str(fault))
        self.fault, self.answered, self.pause = fault, answered, pause


class Attempts:
    """Sends requests to one server, at most `concurrency` at a time. Thread safe."""

    def __init__(self, client: httpx2.Client, shown_url: str, concurrency: int, patience: Patience) -> None:
        self._client, self._where, self._patience = client, shown_url, patience
        self._slots = threading.BoundedSemaphore(concurrency)
        self._breaker = CircuitBreaker(BREAKER_PAUSE_SECONDS, patience.clock)

    def send(self, method: str, url: str, content: bytes | None, read: Callable[[Reply], T]) -> T:
        """`read` of the first good answer.

        `read` may raise ShapeError or RetrievalFault. Raises RetrievalFault when every attempt failed or the circuit is
        open, Refused for an answer that is final.
        """
        permit = self._breaker.ask()
        if isinstance(permit, RetrievalFault):
            raise permit.with_traceback(None)  # raised many times, it would collect tracebacks
        try:
            result = self._repeat(permit, lambda: self._attempt(method, url, content, read))
        except _Again as last:
            self._breaker.failed(permit, last.fault, answered=last.answered)
            raise last.fault.with_traceback(None) from None
        except (Refused, RetrievalFault):
            self._breaker.succeeded(permit)
            raise
        except BaseException:
            self._breaker.abandoned(permit)
            raise
        self._breaker.succeeded(permit)
        return result

    def _repeat(self, permit: Permit, attempt: Callable[[], T]) -> T:
        retries = 0 if permit.probe else self._patience.retries
        for number in range(retries + 1):
            with self._slots:
                self._stop_if_open(permit)
                try:
                    return attempt()
                except _Again as failure:
                    last = failure
            if number < retries:
                self._stop_if_open(permit)
                self._pause(number, last.pause)
        raise last

    def _stop_if_open(self, permit: Permit) -> None:
        """Another request has meanwhile failed through all its attempts: do not wait for the same."""
        fault = self._breaker.opened(permit)
        if fault is not None:
            raise _Again(fault)

    def _pause(self, number: int, asked: float | None) -> None:
        seconds = self._patience.retry_wait_seconds * 2**number
        self._patience.sleep(min(MAX_PAUSE_SECONDS, max(seconds, asked or 0.0)))

    # -- one attempt ---------------------------------------------------------------------------------------------------

    def _attempt(self, method: str, url: str, content: bytes | None, read: Callable[[Reply], T]) -> T:
        reply = self._exchange(method, url, content)
        # A GET asks what not every server has; only one that is busy may have it later.
        if reply.status in _BUSY or (method != "GET" and reply.status >= 500):
            found = f"status {reply.status} {_start(reply.body)}"
            if method == "GET":
                found += f" from {url}"
            remedy = "see the server's log; a server that is busy needs more env.options.retriever.retries"
            fault = self._fault("the retrieval server failed", "status 200", found, remedy)
            raise _Again(fault, answered=True, pause=reply.retry_after)
        if reply.status != 200:
            raise Refused(self._refusal(reply), mismatch=reply.status in _ABOUT_THE_BODY)
        try:
            return read(reply)
        except ShapeError as error:
            fault = self._fault(
                "the retrieval server answers in another format",
                'JSON {"result": [[{"document": {"contents": text}, "score": number}]]}',
                str(error),
                "check that env.options.retriever.url names a server of the Search-R1 protocol",
            )
            if error.is_json:
                raise Refused(fault, mismatch=True) from None
            raise _Again(fault, answered=True) from None

    def _refusal(self, reply: Reply) -> RetrievalFault:
        found = f"status {reply.status} {_start(reply.body)}"
        remedy = "check env.options.retriever.url and env.options.retriever.protocol"
        if reply.location is not None:
            found = f"status {reply.status}, a redirection to {shown(reply.location)}"
            remedy = "put that address into env.options.retriever.url"
        return self._fault("the retrieval server refuses the request", "status 200", found, remedy)

    def _exchange(self, method: str, url: str, content: bytes | None) -> Reply:
        """Send and receive; the time-out is that of the whole answer, which the client's own (of each piece) is not."""
        deadline = self._patience.clock() + self._patience.timeout_seconds
        headers = {} if content is None else {"content-type": "application/json"}
        try:
            with self._client.stream(method, url, content=content, headers=headers) as response:
                pieces, size = [], 0
                for piece in response.iter_bytes():
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_RESPONSE_BYTES:
                        raise Refused(self._too_large(), mismatch=False)
                    if self._patience.clock() > deadline:
                        raise _Again(self._too_slow())
                location = response.headers.get("location") if 300 <= response.status_code < 400 else None
                pause = retry_after_seconds(response.headers.get("retry-after"))
                return Reply(response.status_code, b"".join(pieces), location, pause)
        except httpx2.TimeoutException:
            raise _Again(self._too_slow()) from None
        except (httpx2.RequestError, OSError, UnicodeError) as error:
            found = f"{type(error).__name__} {shown(str(error))}"
            remedy = "start it, or correct env.options.retriever.url"
            fault = self._fault("the retrieval server cannot be reached", "an answer", found, remedy)
            raise _Again(fault) from None

    def _too_slow(self) -> RetrievalFault:
        return self._fault(
            "the retrieval server is too slow",
            f"an answer within {self._patience.timeout_seconds:g} s",
            "none",
            "raise env.options.retriever.timeout_seconds, or lower batch_queries or concurrency",
        )

    def _too_large(self) -> RetrievalFault:
        return self._fault(
            "the retrieval server's answer is too large",
            f"at most {MAX_RESPONSE_BYTES} bytes",
            "more",
            "lower env.options.retriever.batch_queries or topk",
        )

    def _fault(self, what: str, expected: str, found: str, remedy: str) -> RetrievalFault:
        return RetrievalFault(what, where=self._where, expected=expected, found=found, remedy=remedy)


def _start(body: bytes) -> str:
    return shown(body[:400].decode("utf-8", "replace").strip())


def retry_after_seconds(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks to wait: a number or an HTTP date; None where it is missing or senseless.

    >>> retry_after_seconds("2"), retry_after_seconds("soon"), retry_after_seconds(None)
    (2.0, None, None)
    """
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, TypeError):
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
