"""Client of retrieval servers that speak the Search-R1 protocol (`data.retrieval.http.wire`), ours and others.

Failures never raise: each is a RetrievalFault in the place of its query. Connection errors, time-outs, 429, 5xx and answers
that are no JSON are tried again, a bounded number of times and with growing pauses; a server that is down costs one
request's retries, not those of every query (`data.retrieval.http.breaker`). Which index answers is checked: our server tells
its id, and an id that differs from the configured or the first seen one is a fault.
"""

from __future__ import annotations

import ipaddress
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx2

from data.retrieval import Answer, Hit, RetrievalFault
from data.retrieval.http.attempts import Attempts, Patience, Refused, Reply
from data.retrieval.http.wire import ShapeError, many_request, read_object, read_response, shown, single_request
from schemas.errors import ConfigError

UNNAMED = "unnamed"

_HASH = re.compile(r"[0-9a-f]{12,64}")


class HttpRetriever:
    """A retriever behind a URL. Thread safe; connections are kept and reused until `close`.

    url: `http://host:port` or `http://host:port/retrieve`. index: a name for the index, or its hash (12 to 64 hexadecimal
    digits), which is then checked wherever the server tells one. protocol: `queries`, `query` or `auto`, which tries the
    first and keeps what works. timeout_seconds: of a whole answer. retries: attempts after the first; pauses begin at
    `retry_wait_seconds` and double, unless the server names a longer one. batch_queries: queries of one request;
    concurrency: requests at the same time. Raises ConfigError for settings that make no sense.
    """

    def __init__(
        self,
        url: str,
        *,
        index: str = UNNAMED,
        protocol: Literal["auto", "queries", "query"] = "auto",
        timeout_seconds: float = 30.0,
        retries: int = 3,
        retry_wait_seconds: float = 0.5,
        batch_queries: int = 32,
        concurrency: int = 8,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._url, self._health_url, self._where, loopback = _checked_url(url)
        _check("protocol", protocol in ("auto", "queries", "query"), "auto, queries or query", protocol)
        _check("index", bool(index.strip()), "a name or a hash", index)
        _check("timeout_seconds", 0 < timeout_seconds < 1e6, "a positive number of seconds", timeout_seconds)
        _check("retries", 0 <= retries <= 100, "0 to 100", retries)
        _check("retry_wait_seconds", 0 <= retry_wait_seconds < 1e6, "a number of seconds", retry_wait_seconds)
        _check("batch_queries", batch_queries >= 1, "at least 1", batch_queries)
        _check("concurrency", 1 <= concurrency <= 1024, "1 to 1024", concurrency)
        self._index = index.strip()
        self._variant: str | None = None if protocol == "auto" else protocol
        self._batch, self._concurrency = batch_queries, concurrency
        self._variant_lock, self._lock = threading.Lock(), threading.Lock()
        self._seen = False  # whether an answer has told, or not told, the index's id
        self._seen_id: str | None = None
        self._health: Mapping[str, Any] | None = None
        self._pool: ThreadPoolExecutor | None = None
        try:
            self._client = httpx2.Client(
                timeout=timeout_seconds,
                trust_env=not loopback,  # the environment's proxy is another machine and knows nothing of this loopback
                limits=httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
                headers={"accept": "application/json", "accept-encoding": "identity"},
            )
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(
                "the environment's proxy or certificates cannot be used to reach the retrieval server",
                where="HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE or SSL_CERT_DIR",
                found=shown(str(error)),
                remedy="correct the variable, or unset it",
            ) from error
        patience = Patience(timeout_seconds, retries, retry_wait_seconds, clock, sleep)
        self._attempts = Attempts(self._client, self._where, concurrency, patience)

    @property
    def settings(self) -> Mapping[str, Any]:
        """See `data.retrieval.Retriever.settings`: neither the URL nor limits of time decide an answer."""
        return {"kind": "http", "index": self._index}

    def index_id(self) -> str:
        """The id that the server tells, else the configured name. Raises RetrievalFault when it does not answer."""
        return str(self._health_facts().get("index_id", self._index))

    def corpus_sha256(self) -> str | None:
        """Hash of the passages behind the server, None where it tells none. Raises RetrievalFault like `index_id`."""
        told = self._health_facts().get("corpus_sha256")
        return told if isinstance(told, str) else None

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        """See `data.retrieval.Retriever.search`. A blank query finds nothing and is not sent."""
        asked = [number for number, query in enumerate(queries) if query.strip()]
        batches = [[queries[i] for i in asked[at : at + self._batch]] for at in range(0, len(asked), self._batch)]
        if len(batches) > 1:
            parts = self._spread(lambda batch: self._answers(batch, topk), batches)
        else:
            parts = [self._answers(batch, topk) for batch in batches]
        answers: list[Answer] = [[] for _ in queries]
        for number, answer in zip(asked, (answer for part in parts for answer in part), strict=True):
            answers[number] = answer
        return answers

    def close(self) -> None:
        """Close the connections. The retriever is of no use afterwards."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    # -- variants ------------------------------------------------------------------------------------------------------

    def _answers(self, queries: Sequence[str], topk: int) -> list[Answer]:
        answers: list[Answer] = []
        while self._variant is None and len(answers) < len(queries):
            # One query alone finds out which variant the server speaks: more could be refused for another reason.
            query = queries[len(answers)]
            answers += self._faulted(lambda query=query: self._first_answer(query, topk), 1)
        rest, variant = queries[len(answers) :], self._variant
        if variant is None or not rest:
            return answers
        batches = [[query] for query in rest] if variant == "query" else [rest]
        for batch in batches:
            answers += self._faulted(lambda batch=batch: self._ask(variant, batch, topk), len(batch))
        return answers

    def _faulted(self, ask: Callable[[], list[Answer]], queries: int) -> list[Answer]:
        try:
            return ask()
        except Refused as refusal:
            return [_copy(refusal.fault) for _ in range(queries)]
        except RetrievalFault as fault:
            return [_copy(fault) for _ in range(queries)]

    def _first_answer(self, query: str, topk: int) -> list[Answer]:
        """Ask with `queries`; where the server cannot read that, with `query`; what works is kept for good."""
        with self._variant_lock:
            if self._variant is not None:
                return self._ask(self._variant, [query], topk)
            try:
                answers = self._ask("queries", [query], topk)
                self._variant = "queries"
                return answers
            except Refused as refusal:
                if not refusal.mismatch:
                    raise
                first = refusal
            try:
                answers = self._ask("query", [query], topk)
            except Refused:
                raise first from None
            self._variant = "query"
            return answers

    def _ask(self, variant: str, queries: Sequence[str], topk: int) -> list[Answer]:
        """Answers by one variant. Raises what `Attempts.send` raises where that concerns all queries."""
        if variant == "query":
            return list(self._request(single_request(queries[0], topk), 1, topk))
        try:
            return list(self._request(many_request(queries, topk), len(queries), topk))
        except Refused as refusal:
            if len(queries) == 1 or not refusal.mismatch:
                raise
        # One of them may be what the server refuses: the others are to be answered.
        return [answer for query in queries for answer in self._answers([query], topk)]

    def _request(self, body: Mapping[str, Any], queries: int, topk: int) -> list[list[Hit]]:
        def read(reply: Reply) -> list[list[Hit]]:
            hits, told = read_response(reply.body, queries, topk)
            self._check_id(told)
            return hits

        return self._attempts.send("POST", self._url, json.dumps(body).encode(), read)

    def _spread(
        self, work: Callable[[Sequence[str]], list[Answer]], batches: list[Sequence[str]]
    ) -> list[list[Answer]]:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="retrieval")
        return list(self._pool.map(work, batches))

    # -- which index ---------------------------------------------------------------------------------------------------

    def _health_facts(self) -> Mapping[str, Any]:
        """What the server tells of itself, asked once; empty for a server that is not ours."""
        if self._health is None:
            try:
                facts = self._attempts.send("GET", self._health_url, None, _read_health)
            except Refused:
                facts = {}
            if facts:
                self._check_id(facts["index_id"])
            self._health = facts
        return self._health

    def _check_id(self, told: str | None) -> None:
        """Raises RetrievalFault when the server tells another index than configured, or than it told before."""
        if told is not None and _HASH.fullmatch(self._index) and not told.startswith(self._index):
            raise self._other_index(f"index {self._index}", told, "start the server with that index, or correct")
        with self._lock:
            if not self._seen:
                self._seen, self._seen_id = True, told
            seen = self._seen_id
        if told != seen:
            raise self._other_index(
                f"index {seen or 'without an id'} as before",
                told or "one without an id",
                "start a new run for it, or check",
            )

    def _other_index(self, expected: str, found: str, remedy: str) -> RetrievalFault:
        return RetrievalFault(
            "the retrieval server serves another index",
            where=self._where,
            expected=expected,
            found=shown(found),
            remedy=f"{remedy} env.options.retriever.index",
        )


def _copy(fault: RetrievalFault) -> RetrievalFault:
    """One object per query: raised in several episodes, a shared one would collect their tracebacks."""
    return RetrievalFault(
        fault.what, where=fault.where, expected=fault.expected, found=fault.found, remedy=fault.remedy
    )


def _read_health(reply: Reply) -> Mapping[str, Any]:
    try:
        facts = read_object(reply.body)
    except ShapeError:
        return {}
    told = facts.get("index_id")
    return facts if isinstance(told, str) and told else {}


def _checked_url(url: str) -> tuple[str, str, str, bool]:
    """Addresses to ask and of the health check, the address as shown, and whether it is this machine's loopback."""
    try:
        parsed = httpx2.URL(url)
        usable = parsed.scheme in ("http", "https") and bool(parsed.host) and " " not in url
        usable = usable and 0 < (parsed.port or 1) < 65536
    except (httpx2.InvalidURL, TypeError, ValueError):
        usable = False
    _check("url", usable, "http://host:port/retrieve", url)
    path = parsed.path.rstrip("/") or "/retrieve"
    address = parsed.copy_with(path=path, fragment=None)
    health = address.copy_with(path=path.rpartition("/")[0] + "/health", query=None)
    where = address.copy_with(username=None, password=None, query=None)
    return str(address), str(health), str(where), _is_loopback(parsed.host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _check(name: str, good: bool, expected: str, found: object) -> None:
    if not good:
        raise ConfigError(
            "the retriever cannot work with this value",
            where=f"env.options.retriever.{name}",
            expected=expected,
            found=shown(found),
        )
