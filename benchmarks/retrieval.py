"""Building and asking a BM25 index of generated passages, ours beside plain bm25s, in one run.

Passages: words of a Zipf distribution, 60 to 100 a passage, the same in every run. Measured, each as often as `--rounds`
says, in turn, the best counting:

    build   JSON lines on disk to an index on disk; plain bm25s: read, tokenize, index, save
    load    opening the index, memory-mapped, until it can be asked
    query   one query of 2 to 10 words at a time, text to the best three passages; plain bm25s: tokenize and `retrieve`

Ends with exit code 1 when a requirement is missed: 8,000 passages/s, 3 ms at the median, 0.5 s to load; or when an answer
differs from that of bm25s.

    python -m benchmarks.retrieval [--passages 100000] [--workers 2] [--rounds 2] [--queries 1000] [--ours-only]
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from data.retrieval.bm25 import Bm25Retriever
from data.retrieval.index.build import build_index
from data.retrieval.index.directory import IndexDirectory

NEED_PASSAGES_PER_SECOND, NEED_QUERY_MS, NEED_LOAD_SECONDS = 8000.0, 3.0, 0.5
WORDS = 200_000
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


def word(number: int) -> str:
    """An invented word for a rank: frequent words are short."""
    syllables = []
    number += 1
    while number:
        number, rest = divmod(number, len(CONSONANTS) * len(VOWELS))
        syllables.append(CONSONANTS[rest % len(CONSONANTS)] + VOWELS[rest // len(CONSONANTS)])
    return "".join(syllables)


def write_passages(path: Path, count: int) -> None:
    """Passages as JSON lines with id, title and text; the first `n` are the same for every `count` above `n`."""
    vocabulary = np.array([word(number) for number in range(WORDS)], object)
    shares = np.cumsum(1 / np.arange(1, WORDS + 1))
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            random = np.random.Generator(np.random.Philox(key=number))
            size = random.integers(60, 101) + 2
            chosen = vocabulary[np.searchsorted(shares, random.random(size) * shares[-1])].tolist()
            row = {"id": str(number), "title": " ".join(chosen[:2]).title(), "text": " ".join(chosen[2:])}
            file.write(json.dumps(row) + "\n")


def some_queries(corpus: Path, count: int) -> list[str]:
    """Words of random passages, 2 to 10 of one passage."""
    lines = corpus.read_text(encoding="utf-8").splitlines()
    random = np.random.Generator(np.random.Philox(key=2**32))
    queries = []
    for _ in range(count):
        words = json.loads(lines[random.integers(len(lines))])["text"].split()
        queries.append(" ".join(random.choice(words, random.integers(2, 11), replace=False).tolist()))
    return queries


def build_ours(corpus: Path, out: Path, workers: int) -> None:
    build_index([corpus], out, workers=workers)


def build_stock(corpus: Path, out: Path) -> None:
    """What a careful user of bm25s writes: every text in memory, tokenize, index, save with the corpus."""
    import bm25s

    rows = [json.loads(line) for line in corpus.read_text(encoding="utf-8").splitlines()]
    texts = [f"{row['title']}\n{row['text']}" for row in rows]
    model = bm25s.BM25()
    model.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    model.save(str(out), corpus=rows, show_progress=False)


def best_seconds(action: Callable[[], object], rounds: int, clear: Path | None = None) -> float:
    """Wall-clock seconds of the fastest of some runs; `clear` is removed before each."""
    best = float("inf")
    for _ in range(rounds):
        if clear is not None:
            shutil.rmtree(clear, ignore_errors=True)
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def query_times(ask: Callable[[str], Any], queries: list[str]) -> tuple[np.ndarray, list[Any]]:
    """Milliseconds of each query, and the answers."""
    times, answers = [], []
    for query in queries:
        start = time.perf_counter()
        answers.append(ask(query))
        times.append(1000 * (time.perf_counter() - start))
    return np.array(times), answers


def stock_asker(directory: Path, threads: int) -> Callable[[str], Any]:
    import bm25s

    model = bm25s.BM25.load(str(directory), mmap=True, load_corpus=True, show_progress=False)

    def ask(query: str) -> list[float]:
        words = bm25s.tokenize([query], return_ids=False, show_progress=False)
        found = model.retrieve(words, k=3, show_progress=False, n_threads=threads)
        return found.scores[0].tolist()

    return ask


def report(name: str, ours: str, stock: str, ratio: str, need: str, good: bool | None) -> None:
    verdict = {True: "yes", False: "NO", None: ""}[good]
    print(f"{name:<28}{ours:>14}{stock:>14}{ratio:>10}  {need:<12}{verdict}", flush=True)


def peak_megabytes() -> tuple[float, float]:
    """Largest resident memory so far of this process and of the largest worker."""
    return tuple(resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))  # type: ignore[return-value]


def measure(options: argparse.Namespace, folder: Path) -> bool:
    """Measure and print everything; whether each requirement is met."""
    corpus, ours, stock = folder / "corpus.jsonl", folder / "ours", folder / "stock"
    print(f"writing {options.passages} passages", file=sys.stderr)
    write_passages(corpus, options.passages)
    queries = some_queries(corpus, options.queries)
    print(f"building, {options.rounds} rounds", file=sys.stderr)
    seconds = best_seconds(lambda: build_ours(corpus, ours, options.workers), options.rounds, ours)
    parent, worker = peak_megabytes()
    plain = float("nan")
    if not options.ours_only:
        plain = best_seconds(lambda: build_stock(corpus, stock), options.rounds, stock)
    speed, plain_speed = options.passages / seconds, options.passages / plain
    megabytes = corpus.stat().st_size / 1e6
    print(f"{options.passages} passages, {megabytes:.0f} MB, {options.workers} workers")
    print(f"{'':<28}{'ours':>14}{'plain bm25s':>14}{'ratio':>10}  {'needed':<12}met")
    good = [speed >= NEED_PASSAGES_PER_SECOND]
    report(
        "build, passages/s", f"{speed:,.0f}", f"{plain_speed:,.0f}", f"{speed / plain_speed:.2f}", ">= 8,000", good[0]
    )
    report("build, peak memory, MB", f"{parent:.0f} + {worker:.0f}", f"{peak_megabytes()[0]:.0f}", "", "", None)
    load = best_seconds(lambda: Bm25Retriever(IndexDirectory.open(ours)), 5)
    plain_load = float("nan") if options.ours_only else best_seconds(lambda: stock_asker(stock, 0), 3)
    good.append(load < NEED_LOAD_SECONDS)
    report("load, s", f"{load:.3f}", f"{plain_load:.3f}", f"{plain_load / load:.2f}", "< 0.5", good[-1])
    retriever = Bm25Retriever(IndexDirectory.open(ours))
    times, answers = query_times(lambda query: [hit.score for hit in retriever.search([query], 3)[0]], queries)  # type: ignore[union-attr]
    median, tail = np.percentile(times, [50, 95])
    good.append(bool(median < NEED_QUERY_MS))
    for threads in () if options.ours_only else (0, 1):
        stock_times, stock_answers = query_times(stock_asker(stock, threads), queries)
        stock_median, stock_tail = np.percentile(stock_times, [50, 95])
        name = f"n_threads={threads}"
        for figure, mine, theirs, need in (
            ("median", median, stock_median, "< 3"),
            ("95 %", tail, stock_tail, ""),
        ):
            verdict = good[2] if need else None
            report(
                f"query {figure}, ms ({name})", f"{mine:.2f}", f"{theirs:.2f}", f"{theirs / mine:.2f}", need, verdict
            )
        # Where fewer than three passages match, bm25s fills up with passages of score 0.
        found = [[score for score in scores if score > 0] for scores in stock_answers]
        close = [len(a) == len(b) and np.allclose(a, b, rtol=1e-5) for a, b in zip(answers, found, strict=True)]
        good.append(all(close))
        print(f"answers that agree with bm25s ({name}): {sum(close)} of {len(queries)}")
    if options.ours_only:
        report("query median, ms", f"{median:.2f}", "-", "-", "< 3", good[2])
        report("query 95 %, ms", f"{tail:.2f}", "-", "-", "", None)
    return all(good)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--ours-only", action="store_true", help="leave plain bm25s out (for sizes it cannot hold)")
    parser.add_argument("--folder", help="where to work; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if not measure(options, Path(folder)):
            sys.exit(1)


if __name__ == "__main__":
    main()
