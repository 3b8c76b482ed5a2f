"""Blocks worked off by several processes, answered in order, with a bounded number in flight.

The first error in the order of the corpus is the one raised, whichever worker is first. Workers end with their parent, also
when that is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import connection
from typing import TypeVar

from data.retrieval.index.sources import Block
from schemas.errors import RsipoError

Result = TypeVar("Result")


def default_workers() -> int:
    """One worker for each processor this process may use, eight at most: beyond that reading is what takes the time."""
    return min(8, len(os.sched_getaffinity(0)))


def map_blocks(
    work: Callable[[Block], Result],
    blocks: Iterable[Block],
    workers: int,
    done: Callable[[Block], Result | None] = lambda block: None,
) -> Iterator[tuple[Block, Result]]:
    """`work` of every block, in order; a block for which `done` knows the result is not worked on.

    The blocks that come back have no content. With one worker, or one block, everything happens in this process; else
    `work` must be picklable. Raises what reading the blocks or working on them raises.
    """
    stream = iter(blocks)
    head = [block for _, block in zip(range(2), stream, strict=False)]
    if workers == 1 or len(head) < 2:
        for block in (*head, *stream):
            known = done(block)
            yield _empty(block), work(block) if known is None else known
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)
    try:
        yield from _in_order(pool, work, _chain(head, stream), 2 * workers, done)
    except BrokenProcessPool as error:
        raise RsipoError(
            "a worker process was killed",
            found="perhaps the memory was not enough",
            remedy="run the same command again, with fewer --workers",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _chain(head: list[Block], stream: Iterator[Block]) -> Iterator[Block]:
    yield from head
    yield from stream


def _in_order(
    pool: ProcessPoolExecutor,
    work: Callable[[Block], Result],
    blocks: Iterator[Block],
    depth: int,
    done: Callable[[Block], Result | None],
) -> Iterator[tuple[Block, Result]]:
    pending: deque[tuple[Block, Future[Result] | Result]] = deque()
    failure: Exception | None = None
    while True:
        try:
            block = next(blocks, None)
        except Exception as error:  # kept until the blocks before it are through: theirs comes first
            block, failure = None, error
        if block is None:
            break
        known = done(block)
        pending.append((_empty(block), pool.submit(work, block) if known is None else known))
        if len(pending) >= depth:
            yield _settled(*pending.popleft())
    while pending:
        yield _settled(*pending.popleft())
    if failure is not None:
        raise failure


def _settled(block: Block, result: Future[Result] | Result) -> tuple[Block, Result]:
    return block, result.result() if isinstance(result, Future) else result


def _empty(block: Block) -> Block:
    return replace(block, content=b"")


def _start_worker() -> None:
    # Ctrl-C reaches the whole group; the parent decides what follows from it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
