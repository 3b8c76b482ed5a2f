"""Measure the retrieval server: queries per second over loopback, beside plain bm25s calls in one process, in one run.

Builds a BM25 index of generated passages (about 100 words each, word frequencies as in English text), starts
`rsipo index serve` on it and lets a second process ask with 16 connections at once, one query a request. Rounds alternate
with rounds of plain `bm25s.BM25.retrieve` calls on the same memory-mapped index with the same queries, one at a time, so
that a busy machine slows both alike. Client and server share the processors.

    python -m benchmarks.retrieval_server
    python -m benchmarks.retrieval_server --passages 20000 --clients 4 --rounds 3

Exit code 1 below `--required` queries per second (300).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from data.retrieval import Passage
from data.retrieval.index.build import build_index_from

ROOT = Path(__file__).resolve().parent.parent
WORDS, WORDS_OF_A_PASSAGE, TOPK = 60_000, 100, 3


def generated_passages(count: int, seed: int = 1) -> Iterator[Passage]:
    """Passages of invented words whose frequencies follow Zipf's law."""
    draw = np.random.default_rng(seed)
    words = np.array([word_of(number) for number in range(WORDS)])
    ladder = np.cumsum(1.0 / np.arange(1, WORDS + 1))
    for number in range(count):
        drawn = words[np.searchsorted(ladder, draw.random(WORDS_OF_A_PASSAGE) * ladder[-1])]
        yield Passage(str(number), " ".join(drawn[:2]).title(), " ".join(drawn))


def word_of(number: int) -> str:
    """An invented word, another for every number."""
    syllables = []
    number += 1
    while number:
        number, rest = divmod(number, 80)
        syllables.append("bdfgklmnprstvxzh"[rest // 5] + "aeiou"[rest % 5])
    return "".join(syllables) + "n"


def queries_of(passages: Sequence[Passage], count: int, seed: int = 2) -> list[str]:
    """Queries of six words from one passage each, as a policy would ask for what it has read of."""
    draw = random.Random(seed)
    return [" ".join(draw.sample(draw.choice(passages).text.split(), 6)) for _ in range(count)]


@contextmanager
def running_server(index: Path) -> Iterator[str]:
    """The real server as a process of its own; gives its URL."""
    command = [sys.executable, "-m", "rsipo_cli", "index", "serve", "--index", str(index), "--port", "0", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def _ask(url: str, queries: list[str], latencies: list[float]) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    while queries:
        body = json.dumps({"queries": [queries.pop()], "topk": TOPK, "return_scores": True}).encode()
        head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: {len(body)}\r\n\r\n"
        started = time.perf_counter()
        writer.write(head.encode() + body)
        answer_head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer_head.partition(b"content-length:")[2].split(None, 1)[0])
        answer = await reader.readexactly(length)
        latencies.append(time.perf_counter() - started)
        if b" 200 " not in answer_head or len(json.loads(answer)["result"]) != 1:
            raise RuntimeError(f"the server answered {answer_head + answer[:200]!r}")
    writer.close()


def client(url: str, queries: list[str], connections: int, results: multiprocessing.Queue) -> None:
    """Ask all queries over so many connections at once; puts seconds and latencies into `results`."""

    async def work() -> None:
        latencies: list[float] = []
        left = list(queries)
        started = time.perf_counter()
        await asyncio.gather(*(_ask(url, left, latencies) for _ in range(connections)))
        results.put((time.perf_counter() - started, latencies))

    asyncio.run(work())


def served(url: str, queries: list[str], connections: int) -> tuple[float, list[float]]:
    """Seconds, and the latency of every request, of one round in a process of its own."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue = context.Queue()
    process = context.Process(target=client, args=(url, queries, connections, results))
    process.start()
    seconds, latencies = results.get(timeout=600)
    process.join()
    return seconds, latencies


class PlainBm25:
    """bm25s as its documentation shows it, on the index's own files."""

    def __init__(self, index: Path) -> None:
        import bm25s

        self._tokenize = bm25s.tokenize
        self._bm25 = bm25s.BM25.load(str(index), mmap=True)

    def seconds(self, queries: Sequence[str]) -> float:
        """Seconds for all queries, one call each."""
        started = time.perf_counter()
        for query in queries:
            tokens = self._tokenize([query], stopwords=None, return_ids=False, show_progress=False)
            self._bm25.retrieve(tokens, k=TOPK, show_progress=False)
        return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=16, help="connections at once")
    parser.add_argument("--queries", type=int, default=2000, help="queries of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--required", type=float, default=300.0, help="queries per second")
    parser.add_argument("--index", type=Path, help="keep the index here, and take it from here if it is there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        index = options.index or Path(folder) / "index"
        passages = list(generated_passages(options.passages))
        build_index_from(passages, index, workers=2)
        queries = queries_of(passages, options.queries)
        del passages
        plain = PlainBm25(index)
        latencies: list[float] = []
        server_rates, plain_rates = [], []
        with running_server(index) as url:
            served(url, queries[:200], options.clients)  # pages of the index come into memory, for both
            plain.seconds(queries[:50])
            for _ in range(options.rounds):
                seconds, some = served(url, queries, options.clients)
                server_rates.append(len(queries) / seconds)
                latencies += some
                plain_rates.append(len(queries) / plain.seconds(queries))
    rate, plain_rate = statistics.median(server_rates), statistics.median(plain_rates)
    percentiles = statistics.quantiles(latencies, n=20)
    print(
        f"{options.passages} passages, {options.clients} connections, {options.rounds} rounds of {len(queries)} queries"
    )
    print(f"server            {rate:8.0f} queries/s   (rounds: {min(server_rates):.0f} to {max(server_rates):.0f})")
    print(
        f"  latency         {statistics.median(latencies) * 1e3:8.1f} ms median, {percentiles[18] * 1e3:.1f} ms at 95 %"
    )
    print(f"plain bm25s calls {plain_rate:8.0f} queries/s   (rounds: {min(plain_rates):.0f} to {max(plain_rates):.0f})")
    print(f"ratio             {rate / plain_rate:8.2f}")
    good = rate >= options.required
    print(f"required: at least {options.required:g} queries/s: {'met' if good else 'NOT met'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
