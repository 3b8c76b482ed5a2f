"""Retrievers and servers that the tests of the HTTP client, the server and the cache share."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from data.retrieval import Answer, Hit, Passage, RetrievalFault

Respond = Callable[[str, Any], tuple[int, str | bytes, Mapping[str, str]]]


def passages_for(query: str, topk: int) -> list[Hit]:
    """What the fake index holds for a query: a function of both alone."""
    return [Hit(Passage(f"{query}-{n}", f'"{query}" {n}', f"text {n}\nof {query}"), 10.0 - n) for n in range(topk)]


class FakeRetriever:
    """Answers from nothing, counts what it is asked; `broken` queries are faults, and `gate` holds every answer back."""

    def __init__(self, index: str = "0123456789abcdef" * 4, broken: Sequence[str] = ()) -> None:
        self.index, self.broken = index, broken
        self.asked: list[str] = []
        self.gate: threading.Event | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"kind": "fake"}

    def index_id(self) -> str:
        return self.index

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        self.asked.extend(queries)
        if self.gate is not None:
            self.gate.wait(30)
        return [RetrievalFault("broken") if q in self.broken else passages_for(q, topk) for q in queries]

    def close(self) -> None: ...


@contextmanager
def http_server(respond: Respond) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """A server on a free port of the loopback: its URL, and the (path, parsed body) of every request so far.

    `respond(path, body)` gives status, body (text is sent as it is) and headers.
    """
    requests: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            body = json.loads(content) if content else None
            requests.append((self.path, body))
            status, answer, headers = respond(self.path, body)
            data = answer.encode() if isinstance(answer, str) else answer
            self.send_response(status)
            for name, value in {"content-length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def document(hit: Hit) -> dict[str, Any]:
    """A passage as wiki-18 holds it."""
    contents = f'"{hit.passage.title}"\n{hit.passage.text}'
    return {"id": hit.passage.passage_id, "contents": contents}


def standard_answer(body: Mapping[str, Any]) -> dict[str, Any]:
    """What Search-R1's own server answers."""
    return {
        "result": [
            [{"document": document(hit), "score": hit.score} for hit in passages_for(query, body["topk"])]
            for query in body["queries"]
        ]
    }
