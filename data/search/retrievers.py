"""From the environment's options to a retriever: a local index, a generated one, or a server; with or without a cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.panel_sources import GENERATED
from data.retrieval import Answer, Retriever
from data.retrieval.cache_home import cache_home
from data.search.options import RetrieverOptions, SearchOptions
from schemas.artifacts import MANIFEST, sha256_json
from schemas.config_loading import code_version
from schemas.errors import ArtifactError, ConfigError, LockError

if TYPE_CHECKING:
    from data.retrieval.cache import CachedRetriever
    from data.retrieval.index.directory import IndexDirectory

URL_VARIABLE = "RSIPO_RETRIEVER_URL"
BUILD_SECONDS = 600.0  # wait for another process that makes the same generated index, which takes it a few


class CountedRetriever:
    """The retriever of one environment; counts what is asked of it. `corpus` tells the hash of its passages, if known."""

    def __init__(
        self, inner: Retriever, corpus: Callable[[], str | None], cache: CachedRetriever | None = None
    ) -> None:
        self._inner, self._corpus, self._cache = cache or inner, corpus, cache
        self.asked = 0  # searches of episodes; several may share a query
        self.looked_up = 0
        self.empty = 0  # searches that found nothing

    @property
    def settings(self) -> Mapping[str, Any]:
        """See `data.retrieval.Retriever.settings`."""
        return self._inner.settings

    def index_id(self) -> str:
        """See `data.retrieval.Retriever.index_id`."""
        return self._inner.index_id()

    def corpus_sha256(self) -> str | None:
        """Hash of the passages, None where it is not known. Raises RetrievalFault like `index_id`."""
        return self._corpus()

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        """See `data.retrieval.Retriever.search`."""
        self.looked_up += len(queries)
        return self._inner.search(queries, topk)

    def counters(self) -> dict[str, float]:
        """`searches` of episodes, how many found nothing, `lookups` of distinct queries, the cache's hits and misses."""
        counts = {"searches": float(self.asked), "found_nothing": float(self.empty), "lookups": float(self.looked_up)}
        if self._cache is not None:
            counts |= {"cache_hits": float(self._cache.hits), "cache_misses": float(self._cache.misses)}
        return counts

    def close(self) -> None:
        """Close what is below."""
        self._inner.close()


def open_retriever(options: SearchOptions) -> CountedRetriever:
    """The retriever that the options describe.

    Raises ConfigError for a source, URL or kind that cannot be, ArtifactError for an index that is missing or damaged.
    Touches no network: a server is asked when the first episode starts.
    """
    chosen = options.retriever
    inner, corpus = _server(chosen) if chosen.kind == "http" else _local(chosen)
    if options.cache is None:
        return CountedRetriever(inner, corpus)
    from data.retrieval.cache import CachedRetriever

    path = Path(options.cache.path) if options.cache.path else cache_home() / "queries.sqlite"
    return CountedRetriever(inner, corpus, CachedRetriever(inner, path, max_megabytes=options.cache.max_megabytes))


def _server(chosen: RetrieverOptions) -> tuple[Retriever, Callable[[], str | None]]:
    from data.retrieval.http.client import HttpRetriever

    url = os.environ.get(URL_VARIABLE) or chosen.url
    if not url:
        raise ConfigError(
            "the address of the retrieval server is not known",
            where="env.options.retriever.url",
            expected=f"a URL such as http://127.0.0.1:8000, here or in the variable {URL_VARIABLE}",
        )
    client = HttpRetriever(
        url,
        index=chosen.index,
        protocol=chosen.protocol,
        timeout_seconds=chosen.timeout_seconds,
        retries=chosen.retries,
        retry_wait_seconds=chosen.retry_wait_seconds,
        batch_queries=chosen.batch_queries,
        concurrency=chosen.concurrency,
    )
    return client, client.corpus_sha256


def _local(chosen: RetrieverOptions) -> tuple[Retriever, Callable[[], str | None]]:
    from data.retrieval.open_index import retriever_of

    index = open_index(chosen.index)
    if index.kind != chosen.kind:
        raise ConfigError(
            "the index is of another kind", where="env.options.retriever", expected=chosen.kind, found=index.kind
        )
    return retriever_of(index), lambda: index.corpus_sha256


def open_index(source: str) -> IndexDirectory:
    """The index in a directory, or that of a generated encyclopaedia. Raises ArtifactError or ConfigError for neither."""
    from data.retrieval.index.directory import IndexDirectory

    return generated_index(source) if source.startswith(GENERATED) else IndexDirectory.open(source)


def generated_index(source: str) -> IndexDirectory:
    """The BM25 index of a generated encyclopaedia, made in the cache directory where this release has not yet made it.

    One that is damaged is made again; one that another process makes is waited for. Raises LockError when that takes longer
    than `BUILD_SECONDS`, ArtifactError when the cache directory cannot be used.
    """
    from data.retrieval.index.build import build_index_from
    from data.retrieval.index.directory import IndexDirectory
    from data.search.encyclopaedia import generate_world
    from data.search.panels import parse_world

    articles, seed = parse_world(source)
    name = sha256_json({"articles": articles, "seed": seed, "code": code_version()})[:16]
    path = cache_home() / "indexes" / f"generated-{articles}-{seed}-{name}"
    deadline = time.monotonic() + BUILD_SECONDS
    anew = False
    while True:
        try:
            if (path / MANIFEST).is_file() and not anew:
                return IndexDirectory.open(path)
            return build_index_from(generate_world(seed, articles).passages, path, force=anew)
        except LockError:  # another process of the run, or another run, makes it just now
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        except ArtifactError:  # damaged, and nobody but this function knows how to make it again
            if anew:
                raise
            anew = True
