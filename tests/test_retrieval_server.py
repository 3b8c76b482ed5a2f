"""The retrieval server: both request variants, every bound, a health check under load, a clean end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from data.retrieval import Answer, Passage
from data.retrieval.http.client import HttpRetriever
from data.retrieval.http.dispatch import Dispatcher
from data.retrieval.http.server import MAX_BODY_BYTES, IndexInfo, create_app, listen, run_server, url_of
from rsipo_cli.serve import serve
from schemas.errors import ConfigError, RsipoError
from tests.retrieval_fakes import FakeRetriever, passages_for

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def serving(retriever: FakeRetriever, **bounds: int) -> Iterator[httpx2.Client]:
    """A client of a server in another thread."""
    info = IndexInfo(retriever.index_id(), "c" * 64, "fake", 3)
    app = create_app(retriever, info, **bounds)
    listener = listen("127.0.0.1", 0)
    server: list[Any] = []
    thread = threading.Thread(
        target=run_server, args=(app, listener), kwargs={"ready": lambda: None, "keep": server.append}
    )
    thread.start()
    limits = httpx2.Limits(max_connections=64)
    with httpx2.Client(base_url=url_of(listener), trust_env=False, timeout=30, limits=limits) as client:
        try:
            yield client
        finally:
            if getattr(retriever, "gate", None) is not None:
                retriever.gate.set()
            server[0].should_exit = True
    thread.join(60)
    assert not thread.is_alive()


def hits_of(query: str, topk: int) -> list[dict[str, Any]]:
    """What the wire carries for the fake retriever's answer."""
    return [
        {
            "document": {
                "id": hit.passage.passage_id,
                "title": hit.passage.title,
                "text": hit.passage.text,
                "contents": f'"{hit.passage.title}"\n{hit.passage.text}',
            },
            "score": hit.score,
        }
        for hit in passages_for(query, topk)
    ]


def until(condition: Any) -> None:
    """Wait for something that another thread is about to do."""
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen within half a minute")


def test_both_variants_are_answered_in_the_protocols_shape_with_the_index_id() -> None:
    retriever = FakeRetriever()
    with serving(retriever, default_topk=2) as client:
        many = client.post("/retrieve", json={"queries": ["a", "b"], "topk": 1, "return_scores": True}).json()
        assert many == {"result": [hits_of("a", 1), hits_of("b", 1)], "index_id": retriever.index}
        single = client.post("/retrieve", json={"query": "a"}).json()
        assert single == {"result": [hits_of("a", 2)], "index_id": retriever.index}


@pytest.mark.parametrize("protocol", ["auto", "queries", "query"])
def test_our_client_gets_what_the_retriever_gives_in_every_variant(protocol: Any) -> None:
    retriever = FakeRetriever()
    with serving(retriever) as client:
        remote = HttpRetriever(str(client.base_url), protocol=protocol, batch_queries=7)
        queries = [f"{number} \u00e4\u2028\U0001f600" for number in range(40)]
        assert remote.search(queries, 3) == retriever.search(queries, 3)
        assert (remote.index_id(), remote.corpus_sha256()) == (retriever.index, "c" * 64)
        remote.close()


BAD = {
    "no JSON": (b"{", 400, "not a JSON object"),
    "a list": (b"[]", 400, "not a JSON object"),
    "nested without end": (b"[" * 100_000, 400, "not a JSON object"),
    "neither field": (b'{"topk": 1}', 422, "expected 'queries'"),
    "queries as text": (b'{"queries": "a"}', 422, "a list of texts"),
    "no queries": (b'{"queries": []}', 422, "1 to 5 queries, found 0"),
    "too many": (json.dumps({"queries": ["a"] * 6}).encode(), 422, "found 6"),
    "a number": (b'{"queries": ["a", 7]}', 422, "found 7"),
    "a long query": (json.dumps({"query": "a" * 10_001}).encode(), 422, "10001"),
    "topk 0": (b'{"query": "a", "topk": 0}', 422, "1 to 9, found 0"),
    "topk too high": (b'{"query": "a", "topk": 10}', 422, "found 10"),
    "topk true": (b'{"query": "a", "topk": true}', 422, "found true"),
    "topk as text": (b'{"query": "a", "topk": "3"}', 422, "'topk'"),
    "a large body": (b" " * (MAX_BODY_BYTES + 1), 413, "at most"),
}


def test_bad_requests_are_refused_with_one_sentence_and_never_reach_the_retriever() -> None:
    retriever = FakeRetriever()
    with serving(retriever, max_queries=5, max_topk=9) as client:
        for name, (body, status, part) in BAD.items():
            answer = client.post("/retrieve", content=body)
            sentence = answer.json()["error"]
            assert (name, answer.status_code) == (name, status) and part in sentence and "\n" not in sentence, sentence
        assert client.get("/retrieve").status_code == 405
        assert client.get("/other").status_code == 404
        assert client.post("/retrieve", json={"query": "a"}).status_code == 200
    assert retriever.asked == ["a"]


def test_more_requests_than_may_wait_are_refused_and_health_answers_all_the_while() -> None:
    retriever = FakeRetriever()
    retriever.gate = threading.Event()
    with serving(retriever, max_concurrency=1, max_waiting=3) as client, ThreadPoolExecutor(8) as pool:
        first = pool.submit(client.post, "/retrieve", json={"query": "first"})
        until(lambda: retriever.asked == ["first"])
        waiting = [pool.submit(client.post, "/retrieve", json={"query": f"w{number}"}) for number in range(3)]
        until(lambda: client.get("/health").json()["waiting"] == 3)
        health = client.get("/health").json()
        assert (health["status"], health["index_id"], health["running"]) == ("ok", retriever.index, 1)
        refused = client.post("/retrieve", json={"query": "late"})
        assert (
            refused.status_code == 503 and refused.headers["retry-after"] == "1" and "wait" in refused.json()["error"]
        )
        retriever.gate.set()
        answers = [future.result().json()["result"] for future in [first, *waiting]]
    assert answers == [[hits_of(query, 3)] for query in ("first", "w0", "w1", "w2")]
    assert "late" not in retriever.asked


def test_a_request_at_the_moment_when_the_last_worker_ends_is_not_left_waiting() -> None:
    async def one_after_the_other() -> list[list[Answer]]:
        dispatcher = Dispatcher(FakeRetriever(), max_concurrency=1, max_waiting=8)
        answers = [await dispatcher.search([query], 1) for query in "abc"]  # each asked in the step that got the last
        assert dispatcher.running == dispatcher.waiting == 0
        dispatcher.close()
        return answers

    answers = asyncio.run(asyncio.wait_for(one_after_the_other(), 20))
    assert answers == [[passages_for(query, 1)] for query in "abc"]


def test_requests_that_wait_together_get_each_its_own_answer() -> None:
    calls: list[list[str]] = []

    class Recording(FakeRetriever):
        def search(self, queries: Any, topk: int) -> Any:
            calls.append(list(queries))
            return super().search(queries, topk)

    retriever = Recording()
    retriever.gate = threading.Event()
    with serving(retriever, max_concurrency=1) as client, ThreadPoolExecutor(16) as pool:
        bodies = [{"queries": [f"q{n}", f"r{n}"], "topk": 1 + n % 2} for n in range(12)]
        first = pool.submit(client.post, "/retrieve", json={"query": "first"})
        until(lambda: calls)
        futures = [pool.submit(client.post, "/retrieve", json=body) for body in bodies]
        until(lambda: client.get("/health").json()["waiting"] == len(bodies))
        retriever.gate.set()
        first.result()
        for body, future in zip(bodies, futures, strict=True):
            expected = [hits_of(query, body["topk"]) for query in body["queries"]]
            assert future.result().json()["result"] == expected


def test_what_waits_with_one_number_of_passages_is_retrieved_in_one_call_up_to_a_bound() -> None:
    calls: list[tuple[int, int]] = []

    class Recording(FakeRetriever):
        def search(self, queries: Any, topk: int) -> Any:
            calls.append((len(queries), topk))
            return super().search(queries, topk)

    async def together(requests: list[tuple[int, int]]) -> None:
        retriever = Recording()
        retriever.gate = threading.Event()
        dispatcher = Dispatcher(retriever, max_concurrency=1, max_waiting=len(requests))
        first = asyncio.create_task(dispatcher.search(["first"], 1))
        while not calls:
            await asyncio.sleep(0.001)
        tasks = [asyncio.create_task(dispatcher.search(["q"] * size, topk)) for size, topk in requests]
        await asyncio.sleep(0)  # each has asked and waits
        retriever.gate.set()
        assert [len(answers) for answers in await asyncio.gather(first, *tasks)] == [1, *(n for n, _ in requests)]
        dispatcher.close()

    asyncio.run(together([(30, 3), (30, 3), (30, 3), (5, 2), (5, 3), (100, 3), (1, 3)]))
    assert calls == [(1, 1), (60, 3), (30, 3), (5, 2), (5, 3), (100, 3), (1, 3)]


def test_a_query_that_breaks_the_retriever_breaks_no_other_request() -> None:
    class Breaking(FakeRetriever):
        def search(self, queries: Any, topk: int) -> Any:
            answers = super().search(queries, topk)
            if "boom" in queries:
                raise ZeroDivisionError
            return answers

    retriever = Breaking(broken=["bad"])
    retriever.gate = threading.Event()
    with serving(retriever, max_concurrency=1) as client, ThreadPoolExecutor(8) as pool:
        first = pool.submit(client.post, "/retrieve", json={"query": "first"})
        until(lambda: retriever.asked)
        futures = [pool.submit(client.post, "/retrieve", json={"query": query}) for query in ("a", "boom", "bad", "b")]
        until(lambda: client.get("/health").json()["waiting"] == 4)
        retriever.gate.set()
        assert first.result().status_code == 200
        assert [future.result().status_code for future in futures] == [200, 500, 502, 200]
        assert futures[3].result().json()["result"] == [hits_of("b", 3)]
        assert "ZeroDivisionError" not in futures[1].result().text


def test_a_port_in_use_is_one_sentence() -> None:
    with listen("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match=r"cannot listen.*--port 0"):
        listen("127.0.0.1", listener.getsockname()[1])


# --- the command


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from data.retrieval.index.build import build_index_from

    passages = [
        Passage("1", "Aru", "The mountain Aru lies in Belonia."),
        Passage("2", "Belonia", "Belonia is a country with a river."),
        Passage("3", "Ciro", "The river Ciro flows through Belonia."),
    ]
    return build_index_from(passages, tmp_path_factory.mktemp("index") / "small").path


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "rsipo_cli", "index", "serve", *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> Mapping[str, Any]:
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return json.loads(line)


def test_blank_queries_of_other_clients_find_nothing_and_spoil_no_batch(index: Path) -> None:
    from data.retrieval.index.directory import IndexDirectory
    from data.retrieval.open_index import retriever_of

    with serving(retriever_of(IndexDirectory.open(index))) as client:  # type: ignore[arg-type]
        [nothing, found] = client.post("/retrieve", json={"queries": [" ", "mountain"], "topk": 1}).json()["result"]
        assert nothing == [] and len(found) == 1
        assert client.post("/retrieve", json={"query": ""}).json()["result"] == [[]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_an_index_and_ends_cleanly_after_the_request_in_flight(index: Path, number: int) -> None:
    from data.retrieval.index.directory import IndexDirectory
    from data.retrieval.open_index import retriever_of

    local = retriever_of(IndexDirectory.open(index))
    with command("--index", str(index), "--port", "0", "--json") as process:
        facts = ready(process)
        remote = HttpRetriever(facts["url"], index=facts["index_id"])
        queries = ["river in Belonia", "mountain", "nothing of the kind"]
        assert remote.search(queries, 2) == local.search(queries, 2)
        assert remote.index_id() == local.index_id() == facts["index_id"] and facts["passages"] == 3
        remote.close()
        answer = request_across_a_signal(facts["url"], process, number)
        assert b" 200 " in answer.partition(b"\r\n")[0] and b"Aru" in answer
        out, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert out == "" and error == "rsipo: stopped serving\n"


def request_across_a_signal(url: str, process: subprocess.Popen[str], number: int) -> bytes:
    """Send half a request, then the signal, then the rest; what the server answers until it closes."""
    host, port = url.split("/")[2].split(":")
    body = b'{"query": "mountain", "topk": 1}'
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST /retrieve HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        connection.sendall(head + body[:5])
        # The head is with the server before a later request over another connection is answered.
        httpx2.get(f"http://{host}:{port}/health", trust_env=False)
        process.send_signal(number)
        until(lambda: not accepts(host, int(port)))
        connection.sendall(body[5:])
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


def accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("options", "code", "part"),
    [
        ({"index": "nowhere"}, 3, "there is no index here"),
        ({"topk": 5, "max_topk": 4}, 2, "--topk"),
        ({"host": "no.such.host.invalid"}, 2, "cannot listen"),
        ({"port": None}, 2, "cannot listen"),
    ],
)
def test_what_cannot_be_served_is_an_error_of_its_kind(
    index: Path, options: dict[str, Any], code: int, part: str
) -> None:
    with listen("127.0.0.1", 0) as listener:
        taken = listener.getsockname()[1]
        options = {name: taken if value is None else value for name, value in options.items()}
        with pytest.raises(RsipoError, match=part) as caught:
            serve(**{"index": str(index), **options})
    assert caught.value.exit_code == code


def test_a_host_that_others_can_reach_is_warned_of(index: Path) -> None:
    with command("--index", str(index), "--host", "0.0.0.0", "--port", "0") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving http://0.0.0.0:")
        process.terminate()
        _, error = process.communicate(timeout=60)
    assert "other machines" in error
