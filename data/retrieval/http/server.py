"""Server of one index in the Search-R1 protocol, so that many processes share it.

`POST /retrieve` answers both variants of the request (`queries` or `query`), `GET /health` tells which index this is and
answers under any load. Everything is bounded: size of a request, queries in it, passages asked for, retrievals at a time,
requests waiting (503 and Retry-After beyond). A bad request is a 4xx with one sentence. There is no authentication.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from data.retrieval import Hit, RetrievalFault, Retriever
from data.retrieval.http.dispatch import Busy, Dispatcher
from data.retrieval.http.wire import ShapeError, clean, read_object, response_body, shown
from schemas.errors import ConfigError

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_QUERY_CHARACTERS = 10_000
RETRY_AFTER_SECONDS = 1
SHUTDOWN_SECONDS = 30

_LOG = logging.getLogger("rsipo.retrieval")


@dataclass(frozen=True)
class IndexInfo:
    """What the server tells about its index."""

    index_id: str
    corpus_sha256: str | None
    kind: str
    passages: int | None


class _BadRequest(Exception):
    """A request that cannot be answered: the status and one sentence."""

    def __init__(self, sentence: str, status: int = 422) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class _Question:
    queries: list[str]
    topk: int


def create_app(
    retriever: Retriever,
    index_info: IndexInfo,
    *,
    max_concurrency: int = 2,
    max_waiting: int = 256,
    max_queries: int = 512,
    max_topk: int = 100,
    default_topk: int = 3,
) -> Starlette:
    """The application. The retriever must be usable from several threads where `max_concurrency` is above 1.

    max_waiting: requests that may wait for a retrieval; max_queries: of one request; max_topk: passages of a query;
    default_topk: where a request names no number.
    """
    dispatcher = Dispatcher(retriever, max_concurrency=max_concurrency, max_waiting=max_waiting)
    health_facts = {
        "index_id": index_info.index_id,
        "corpus_sha256": index_info.corpus_sha256,
        "kind": index_info.kind,
        "passages": index_info.passages,
    }

    async def health(request: Request) -> Response:
        load = {"running": dispatcher.running, "waiting": dispatcher.waiting}
        return _json({"status": "ok", **health_facts, **load})

    async def retrieve(request: Request) -> Response:
        try:
            question = read_question(await _body(request), max_queries, max_topk, default_topk)
            answers = await dispatcher.search(question.queries, question.topk)
        except _BadRequest as refusal:
            return _json({"error": str(refusal)}, refusal.status)
        except Busy:
            sentence = f"{max_waiting} requests wait already; ask again later"
            return _json({"error": sentence}, 503, {"retry-after": str(RETRY_AFTER_SECONDS)})
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception:
            _LOG.exception("a retrieval failed")
            return _json({"error": "the retrieval failed; the server's log tells why"}, 500)
        hits: list[list[Hit]] = []
        for answer in answers:
            if isinstance(answer, RetrievalFault):
                return _json({"error": answer.sentence()}, 502)
            hits.append(answer)
        return _json(response_body(hits, index_info.index_id))

    app = Starlette(
        routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health, methods=["GET"])],
        exception_handlers={404: _no_such_path, 405: _no_such_path},
    )
    app.state.dispatcher = dispatcher
    return app


def read_question(body: bytes, max_queries: int, max_topk: int, default_topk: int) -> _Question:
    """What a request asks for. Raises _BadRequest with a sentence that names the field, the rule and what was found."""
    try:
        content = read_object(body)
    except ShapeError as error:
        raise _BadRequest(f"the body is not a JSON object, but {error}", 400) from None
    queries, name = content.get("queries"), "queries"
    if queries is None:
        queries, name = [content.get("query")], "query"
    if not isinstance(queries, list) or (name == "query" and queries[0] is None):
        raise _BadRequest(f"expected 'queries', a list of texts, or 'query', a text; found {shown(content)}")
    if not 1 <= len(queries) <= max_queries:
        raise _BadRequest(f"expected 1 to {max_queries} queries, found {len(queries)}")
    for query in queries:
        if not isinstance(query, str):  # a blank one finds nothing: a policy's, in a batch with those of others
            raise _BadRequest(f"expected in '{name}' a text, found {shown(query)}")
        if len(query) > MAX_QUERY_CHARACTERS:
            raise _BadRequest(f"expected queries of at most {MAX_QUERY_CHARACTERS} characters, found {len(query)}")
    topk = content.get("topk")
    topk = default_topk if topk is None else topk
    if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= max_topk:
        raise _BadRequest(f"expected 'topk' from 1 to {max_topk}, found {shown(topk)}")
    return _Question([clean(query) for query in queries], topk)


async def _body(request: Request) -> bytes:
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise _BadRequest(f"expected a body of at most {MAX_BODY_BYTES} bytes", 413)
        pieces.append(piece)
    return b"".join(pieces)


async def _no_such_path(request: Request, error: Exception) -> Response:
    sentence = f"expected POST /retrieve or GET /health, found {request.method} {shown(request.url.path)}"
    return _json({"error": sentence}, getattr(error, "status_code", 404))


def _json(content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    return Response(body, status, dict(headers or {}), media_type="application/json")


# -- the process -------------------------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises ConfigError when the address cannot be had."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, number)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(
            "cannot listen there",
            where=f"{host}:{port}",
            found=getattr(error, "strerror", None) or str(error),
            remedy="choose another --host or --port; --port 0 takes a free one",
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """`http://127.0.0.1:8000`."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Ends after what is in flight at the first signal, at once at the second."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)


def run_server(
    app: Starlette,
    listener: socket.socket,
    *,
    ready: Callable[[], object],
    keep: Callable[[uvicorn.Server], object] = lambda server: None,
) -> None:
    """Serve until a signal, then finish what is in flight and raise the signal again.

    `ready` is called once connections are taken. `keep` receives the server, whose `should_exit` ends it without a signal:
    signals reach the main thread alone.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    server = _Server(config)
    keep(server)
    ready()  # the socket queues connections from here on
    try:
        server.run([listener])
    finally:
        app.state.dispatcher.close()
        listener.close()
