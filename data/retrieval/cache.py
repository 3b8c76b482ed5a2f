"""A cache of answers on disk: the same query to the same index is retrieved once, across episodes, steps and processes.

The key holds what decides an answer (settings and id of the index, number of passages, query); faults are never kept. The
file itself is the business of `data.retrieval.cache_file`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.retrieval import Answer, Hit, Passage, RetrievalFault, Retriever
from data.retrieval.cache_file import CacheFile, DamagedEntry
from schemas.errors import ConfigError

UNNAMED = "unnamed"  # the name of an index that nobody named

_FORMAT = 1  # part of the key: entries of another format are never found


def note_on_stderr(text: str) -> None:
    """Say something that a run survives."""
    print(f"rsipo: {text}", file=sys.stderr, flush=True)


class CachedRetriever:
    """Answers from the file where it can, from `inner` where it must; order and content are those of `inner`.

    path: the file, made with its directory when missing. max_megabytes: about its size (10**6 bytes each). note: told once
    when the cache begins anew, and once when it is given up. `hits` and `misses` count queries, `evictions` answers that
    this process made the file forget. Thread safe; processes may share the file. Raises ConfigError where nothing tells
    which index `inner` answers from, for then answers of another index could be taken for its own.
    """

    def __init__(
        self,
        inner: Retriever,
        path: Path | str,
        max_megabytes: float = 1024,
        *,
        note: Callable[[str], object] = note_on_stderr,
    ) -> None:
        if not max_megabytes > 0:
            raise ConfigError(
                "the cache has no room",
                where="env.options.cache.max_megabytes",
                expected="a positive number",
                found=max_megabytes,
            )
        self.hits = self.misses = 0
        self._inner, self._lock = inner, threading.Lock()
        self._file = CacheFile(Path(os.path.expanduser(path)), int(max_megabytes * 1e6), note)
        self._identity: str | None = None
        if inner.settings.get("kind") != "http" or inner.settings.get("index") == UNNAMED:
            # A server with a name is asked when the first search comes; one that is down concerns searches, not this object.
            with contextlib.suppress(RetrievalFault):
                self._identify()

    @property
    def evictions(self) -> int:
        """Answers that this process made the file forget."""
        return self._file.evictions

    @property
    def settings(self) -> Mapping[str, Any]:
        """Those of the inner retriever: a cache decides nothing."""
        return self._inner.settings

    def index_id(self) -> str:
        """See `data.retrieval.Retriever.index_id`."""
        return self._inner.index_id()

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        """See `data.retrieval.Retriever.search`; a query that occurs twice in one call is retrieved once."""
        try:
            identity = self._identify()
        except RetrievalFault:
            return self._inner.search(queries, topk)
        keys = [_key(identity, query, topk) for query in queries]
        answers: dict[bytes, Answer] = dict(self._file.look_up(list(dict.fromkeys(keys)), _unpack))
        missing = {key: query for key, query in zip(keys, queries, strict=True) if key not in answers}
        with self._lock:
            self.hits += sum(key in answers for key in keys)
            self.misses += sum(key in missing for key in keys)
        if missing:
            fresh = dict(zip(missing, self._inner.search(list(missing.values()), topk), strict=True))
            self._file.store({key: _pack(hits) for key, hits in fresh.items() if not isinstance(hits, RetrievalFault)})
            answers |= fresh
        return [answer if isinstance(answer := answers[key], RetrievalFault) else list(answer) for key in keys]

    def close(self) -> None:
        """Close the file and the inner retriever."""
        self._file.close()
        self._inner.close()

    def _identify(self) -> str:
        """What all keys begin with. Raises RetrievalFault when the server does not tell its index now."""
        if self._identity is None:
            index_id = self._inner.index_id()
            if index_id == UNNAMED:
                raise ConfigError(
                    "the cache must know the index, and the server tells none",
                    where="env.options.retriever.index",
                    expected="a name of your choice for the index behind the server",
                    found="none",
                    remedy="name it, and rename it whenever the server serves another; or leave out env.options.cache",
                )
            facts = [_FORMAT, dict(self._inner.settings), index_id]
            self._identity = json.dumps(facts, sort_keys=True, ensure_ascii=True, default=str)
        return self._identity


def _key(identity: str, query: str, topk: int) -> bytes:
    return hashlib.sha256(f"{identity}\n{topk}\n{query}".encode("utf-8", "surrogatepass")).digest()


def _pack(hits: Sequence[Hit]) -> bytes:
    rows = [[hit.passage.passage_id, hit.passage.title, hit.passage.text, hit.score] for hit in hits]
    content = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    return zlib.crc32(content).to_bytes(4, "big") + content


def _unpack(packed: bytes) -> list[Hit]:
    """The inverse of `_pack`. Raises DamagedEntry for bytes that it did not make."""
    checksum, content = packed[:4], packed[4:]
    if zlib.crc32(content).to_bytes(4, "big") != checksum:
        raise DamagedEntry("an entry does not match its checksum")
    rows = json.loads(content.decode("utf-8", "surrogatepass"))
    return [Hit(Passage(passage_id, title, text), score) for passage_id, title, text, score in rows]
