"""Bounded work for a server: at most so many retrievals at a time, at most so many requests waiting, the rest refused.

Requests that wait together are answered together: one call of the retriever for up to `MAX_BATCH` queries. That is sound
because an answer never depends on what else is asked, and it saves a good part of the cost of a request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from data.retrieval import Answer, Retriever

MAX_BATCH = 64


class Busy(Exception):
    """Too many requests wait already."""


@dataclass(frozen=True)
class _Request:
    queries: Sequence[str]
    topk: int
    answers: asyncio.Future[list[Answer]]


class Dispatcher:
    """Answers from a retriever in worker threads. To be used in one event loop."""

    def __init__(self, retriever: Retriever, *, max_concurrency: int, max_waiting: int) -> None:
        self._retriever = retriever
        self._max_concurrency, self._max_waiting = max_concurrency, max_waiting
        self._waiting: deque[_Request] = deque()
        self._running: set[asyncio.Task[None] | None] = set()
        self._threads = ThreadPoolExecutor(max_concurrency, thread_name_prefix="retrieval")

    @property
    def waiting(self) -> int:
        """Requests that no worker has taken up yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Retrievals in progress."""
        return len(self._running)

    async def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        """See `data.retrieval.Retriever.search`. Raises Busy at once when no room is left, and what the retriever raises."""
        if len(self._running) >= self._max_concurrency and len(self._waiting) >= self._max_waiting:
            raise Busy
        request = _Request(queries, topk, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if len(self._running) < self._max_concurrency:
            self._start()
        return await request.answers

    def close(self) -> None:
        """Wait for the retrievals in progress."""
        self._threads.shutdown(wait=True)

    def _start(self) -> None:
        self._running.add(asyncio.get_running_loop().create_task(self._work()))

    async def _work(self) -> None:
        try:
            await self._work_off()
        finally:
            # At once, not when the loop comes to call back: a request that arrives in between would start no worker, and
            # this one takes up no more.
            self._running.discard(asyncio.current_task())

    async def _work_off(self) -> None:
        while batch := self._take():
            queries = [query for request in batch for query in request.queries]
            try:
                answers = await self._retrieve(queries, batch[0].topk)
            except Exception as error:
                if len(batch) == 1:
                    _fail(batch[0], error)
                    continue
                await self._one_by_one(batch)
                continue
            start = 0
            for request in batch:
                end = start + len(request.queries)
                _answer(request, answers[start:end])
                start = end

    async def _one_by_one(self, batch: Sequence[_Request]) -> None:
        """A query that breaks the retriever must not break its neighbours."""
        for request in batch:
            try:
                _answer(request, await self._retrieve(request.queries, request.topk))
            except Exception as error:
                _fail(request, error)

    def _take(self) -> list[_Request]:
        """The next requests with the same number of passages, in order of arrival, as far as they fit into one batch."""
        batch: list[_Request] = []
        size = 0
        while self._waiting:
            request = self._waiting[0]
            if request.answers.done():  # its client is gone
                self._waiting.popleft()
                continue
            size += len(request.queries)
            if batch and (size > MAX_BATCH or request.topk != batch[0].topk):
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _retrieve(self, queries: Sequence[str], topk: int) -> list[Answer]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._retriever.search, queries, topk)


def _answer(request: _Request, answers: list[Answer]) -> None:
    if not request.answers.done():
        request.answers.set_result(answers)


def _fail(request: _Request, error: Exception) -> None:
    if not request.answers.done():
        request.answers.set_exception(error)
