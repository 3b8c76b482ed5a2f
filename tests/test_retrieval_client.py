"""The client of retrieval servers: every protocol variant, every failure a fault in its place, bounded retries."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.retrieval import Hit, Passage, RetrievalFault
from data.retrieval.http.client import HttpRetriever
from data.retrieval.http.wire import ShapeError, read_object, read_response, response_body
from schemas.errors import ConfigError
from tests.retrieval_fakes import document, http_server, passages_for, standard_answer

HASH_A, HASH_B = "a1" * 32, "b2" * 32


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def client(url: str, clock: Clock | None = None, **settings: Any) -> HttpRetriever:
    clock = clock or Clock()
    return HttpRetriever(url, clock=clock, sleep=clock.sleep, **settings)


def answering(answer: Callable[[Any], Any]) -> Callable[[str, Any], tuple[int, str, Mapping[str, str]]]:
    return lambda path, body: (200, json.dumps(answer(body)), {})


def faults(answers: list[Any]) -> list[RetrievalFault]:
    assert all(isinstance(answer, RetrievalFault) for answer in answers), answers
    return answers


# --- variants


def test_search_r1s_own_server_is_understood_and_always_asked_for_scores() -> None:
    with http_server(answering(standard_answer)) as (url, requests):
        answers = client(url, batch_queries=2).search(["a", "b", "c"], 2)
    assert answers == [passages_for(query, 2) for query in "abc"]
    assert all(path == "/retrieve" and body["return_scores"] is True and body["topk"] == 2 for path, body in requests)


def test_a_server_that_takes_one_query_is_found_out_once_and_remembered() -> None:
    def respond(path: str, body: Any) -> tuple[int, str, Mapping[str, str]]:
        if "query" not in body:
            return 422, '{"detail": [{"type": "missing", "loc": ["body", "query"]}]}', {}
        return 200, json.dumps(standard_answer({"queries": [body["query"]], "topk": body["topk"]})), {}

    with http_server(respond) as (url, requests):
        retriever = client(url)
        assert retriever.search(["a", "b"], 1) + retriever.search(["c"], 1) == [passages_for(q, 1) for q in "abc"]
    assert [sorted(body)[0] for _, body in requests] == ["queries", "query", "query", "query"]


def test_a_server_that_answers_the_other_variant_with_status_200_and_an_error_is_found_out() -> None:
    def answer(body: Any) -> Any:
        if "query" not in body:
            return {"result": "", "error": "Either 'query' or 'queries' must be provided"}
        return {"result": [document(hit) for hit in passages_for(body["query"], body["topk"])]}

    with http_server(answering(answer)) as (url, requests):
        answers = client(url).search(["a", "b"], 2)
    assert [[hit.passage for hit in hits] for hits in answers] == [
        [h.passage for h in passages_for(q, 2)] for q in "ab"
    ]
    assert len(requests) == 3


def test_a_query_that_the_server_refuses_does_not_take_the_others_with_it() -> None:
    def respond(path: str, body: Any) -> tuple[int, str, Mapping[str, str]]:
        if "bad" in body.get("queries", ()) or "query" in body:
            return 422, '{"error": "no"}', {}
        return 200, json.dumps(standard_answer(body)), {}

    with http_server(respond) as (url, _):
        answers = client(url).search(["bad", "a", "bad", "b"], 1)
    assert answers[1] == passages_for("a", 1) and answers[3] == passages_for("b", 1)
    faults([answers[0], answers[2]])


def test_a_large_batch_to_a_server_that_is_down_is_one_fault_a_query() -> None:
    queries = [str(number) for number in range(2000)]
    assert (
        len(faults(client(f"http://127.0.0.1:{closed_port()}", retries=0, batch_queries=5000).search(queries, 1)))
        == 2000
    )


def test_blank_queries_find_nothing_and_are_not_sent() -> None:
    with http_server(answering(standard_answer)) as (url, requests):
        assert client(url).search(["", "a", " \n"], 1) == [[], passages_for("a", 1), []]
    assert [body["queries"] for _, body in requests] == [["a"]]


PASSAGE = Passage("7", "Ada", "A mathematician.")
DOCUMENTS = {
    "wiki-18": {"id": "7", "contents": '"Ada"\nA mathematician.'},
    "id as a number": {"id": 7, "contents": '"Ada"\nA mathematician.'},
    "title and text": {"id": "7", "title": "Ada", "text": "A mathematician."},
    "both": {"id": "7", "title": "Ada", "text": "A mathematician.", "contents": '"Ada"\nA mathematician.'},
    "empty text beside contents": {"id": "7", "title": "", "text": "", "contents": '"Ada"\nA mathematician.'},
}


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("key", ["result", "results"])
def test_documents_are_read_in_every_known_form(name: str, key: str) -> None:
    wrapped = {key: [[{"document": DOCUMENTS[name], "score": 2.5}]]}
    plain = {key: [[DOCUMENTS[name]]]}
    flat = {key: [{**DOCUMENTS[name], "score": "2.5"}]}
    assert read_response(json.dumps(wrapped).encode(), 1, 3) == ([[Hit(PASSAGE, 2.5)]], None)
    assert read_response(json.dumps(plain).encode(), 1, 3) == ([[Hit(PASSAGE, 0.0)]], None)
    assert read_response(json.dumps(flat).encode(), 1, 3) == ([[Hit(PASSAGE, 2.5)]], None)


@pytest.mark.parametrize("score", ["NaN", "Infinity", "null", '"high"', "1e999"])
def test_a_score_that_is_no_finite_number_counts_as_zero(score: str) -> None:
    document = '{"id": "7", "title": "Ada", "text": "A mathematician."}'
    body = f'{{"result": [[{{"document": {document}, "score": {score}}}]]}}'
    assert read_response(body.encode(), 1, 3)[0] == [[Hit(PASSAGE, 0.0)]]


def test_fewer_hits_than_asked_for_are_fine_and_more_are_cut() -> None:
    body = json.dumps({"result": [[document(hit) for hit in passages_for("a", 5)], []]}).encode()
    hits, _ = read_response(body, 2, 3)
    assert [len(some) for some in hits] == [3, 0]


def test_passages_without_an_id_get_one_that_depends_on_their_content_alone() -> None:
    body = json.dumps({"result": [[{"contents": "x"}, {"text": "x"}, {"contents": "y"}, "y"]]}).encode()
    ids = [hit.passage.passage_id for hit in read_response(body, 1, 9)[0][0]]
    assert ids[0] == ids[1] and ids[2] == ids[3] and ids[0] != ids[2]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(
    st.lists(st.lists(st.tuples(TEXTS.filter(bool), TEXTS, TEXTS.filter(str.strip), st.floats(-1e6, 1e6)), max_size=3))
)
def test_what_our_server_sends_is_read_back_exactly(content: list[list[tuple[str, str, str, float]]]) -> None:
    answers = [[Hit(Passage(*fields), score) for *fields, score in hits] for hits in content]
    body = json.dumps(response_body(answers, HASH_A)).encode()
    if answers:
        assert read_response(body, len(answers), 3) == (answers, HASH_A)


# --- failures


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_server_that_is_down_costs_one_requests_retries_not_those_of_every_query() -> None:
    clock = Clock()
    retriever = client(f"http://127.0.0.1:{closed_port()}", clock, retries=3, retry_wait_seconds=0.5, batch_queries=1)
    answers = faults(retriever.search([str(n) for n in range(50)], 3))
    assert clock.pauses[:3] == [0.5, 1.0, 2.0] and len(clock.pauses) == 3
    assert all("cannot be reached" in str(fault) for fault in answers)
    assert len({id(fault) for fault in answers}) == 50


def test_a_server_that_comes_back_is_asked_again_after_a_pause() -> None:
    up = threading.Event()

    def respond(path: str, body: Any) -> tuple[int, str, Mapping[str, str]]:
        return (200, json.dumps(standard_answer(body)), {}) if up.is_set() else (503, "starting", {})

    clock = Clock()
    with http_server(respond) as (url, requests):
        retriever = client(url, clock, retries=0, protocol="queries")
        for _ in range(5):
            faults(retriever.search(["a"], 1))
        assert len(requests) == 3  # then the circuit is open
        up.set()
        faults(retriever.search(["a"], 1))
        clock.now += 60
        assert retriever.search(["a", "b"], 1) == [passages_for("a", 1), passages_for("b", 1)]


def test_one_query_that_the_server_fails_on_does_not_close_the_way_for_others() -> None:
    def respond(path: str, body: Any) -> tuple[int, str, Mapping[str, str]]:
        return (500, "boom", {}) if "bad" in body["queries"] else (200, json.dumps(standard_answer(body)), {})

    with http_server(respond) as (url, _):
        retriever = client(url, retries=1, batch_queries=1, concurrency=1)
        answers = retriever.search(["a", "bad", "b", "bad", "c", "bad", "d", "bad", "e"], 1)
    assert answers[::2] == [passages_for(query, 1) for query in "abcde"]
    assert all("status 500 'boom'" in str(fault) for fault in faults(answers[1::2]))


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_busy_server_is_asked_again_when_it_says_so(status: int) -> None:
    left = [1, 1]

    def respond(path: str, body: Any) -> tuple[int, str, Mapping[str, str]]:
        if left:
            left.pop()
            return status, "later", {"retry-after": "7"}
        return 200, json.dumps(standard_answer(body)), {}

    clock = Clock()
    with http_server(respond) as (url, _):
        assert client(url, clock).search(["a"], 1) == [passages_for("a", 1)]
    assert clock.pauses == [7.0, 7.0]


def test_no_pause_is_longer_than_half_a_minute_whatever_the_server_asks() -> None:
    clock = Clock()
    with http_server(lambda path, body: (503, "", {"retry-after": "86400"})) as (url, _):
        faults(client(url, clock, retries=2).search(["a"], 1))
    assert clock.pauses == [30.0, 30.0]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 422])
def test_a_refusal_is_not_repeated(status: int) -> None:
    clock = Clock()
    with http_server(lambda path, body: (status, "no", {})) as (url, requests):
        (fault,) = faults(client(url, clock, protocol="queries").search(["a"], 1))
    assert len(requests) == 1 and not clock.pauses
    assert f"status {status} 'no'" in str(fault) and url in str(fault)


def test_a_redirection_is_named_and_not_followed() -> None:
    with http_server(lambda path, body: (307, "", {"location": "http://example.invalid/x"})) as (url, requests):
        (fault,) = faults(client(url).search(["a"], 1))
    assert "http://example.invalid/x" in str(fault) and len(requests) == 1


def test_a_page_instead_of_json_is_retried_and_shown_escaped_and_short() -> None:
    page = "<html>\x1b[31m\n" + "x" * 5000
    with http_server(lambda path, body: (200, page, {})) as (url, requests):
        (fault,) = faults(client(url, retries=2).search(["a"], 1))
    assert len(requests) == 3
    assert "'<html>\\x1b[31m" in str(fault) and len(str(fault)) < 600 and str(fault).isprintable()


GARBAGE = [
    '{"result": 5}',
    "[]",
    '{"result": [[1]]}',
    '{"result": [[{"document": {"name": 1}}]]}',
    '{"answer": []}',
    "null",
]


@pytest.mark.parametrize("body", [*GARBAGE, '{"result": [[], []]}'])
def test_json_of_another_shape_is_a_fault_at_once(body: str) -> None:
    clock = Clock()
    with http_server(lambda path, _: (200, body, {})) as (url, requests):
        (fault,) = faults(client(url, clock, protocol="queries").search(["a"], 1))
    assert "another format" in str(fault) and len(requests) == 1 and not clock.pauses


@pytest.mark.parametrize("body", ["[" * 100_000, '{"a": ' + "9" * 10_000 + "}", "", '{"result": [[', b"\xff\xfe"])
def test_no_bytes_make_the_client_raise(body: str | bytes) -> None:
    with http_server(lambda path, _: (200, body, {})) as (url, _):
        faults(client(url, retries=0).search(["a"], 1))


def test_json_of_any_depth_is_a_fault_of_the_answer() -> None:
    for depth in range(900, 1000):
        with pytest.raises(ShapeError):
            read_object(b"[" * depth + b"]" * depth)


def test_a_wrong_number_of_results_is_never_given_to_the_wrong_queries() -> None:
    with http_server(answering(lambda body: {"result": standard_answer(body)["result"][:1]})) as (url, _):
        answers = client(url, protocol="queries").search(["a", "b"], 1)
    assert answers == [passages_for("a", 1), passages_for("b", 1)]  # asked again, one by one


def test_an_answer_without_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.retrieval.http.attempts.MAX_RESPONSE_BYTES", 1000)
    with http_server(lambda path, body: (200, "x" * 5000, {})) as (url, requests):
        (fault,) = faults(client(url).search(["a"], 1))
    assert "too large" in str(fault) and len(requests) == 1


def test_a_server_that_is_too_slow_is_a_fault() -> None:
    release = threading.Event()

    def respond(path: str, body: Any) -> tuple[int, str, Mapping[str, str]]:
        release.wait(30)
        return 200, "{}", {}

    with http_server(respond) as (url, _):
        (fault,) = faults(client(url, timeout_seconds=0.05, retries=1).search(["a"], 1))
        release.set()
    assert "too slow" in str(fault) and "within 0.05 s" in str(fault)


def test_the_time_out_is_that_of_the_whole_answer_not_of_each_piece() -> None:
    clock = Clock()
    listener = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        for _ in range(20):
            clock.now += 1.0
            try:
                connection.sendall(b" ")
            except OSError:
                break
        connection.close()

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    (fault,) = faults(
        client(f"http://127.0.0.1:{listener.getsockname()[1]}", clock, timeout_seconds=5, retries=0).search(["a"], 1)
    )
    listener.close()
    thread.join()
    assert "too slow" in str(fault)


def test_as_many_requests_are_under_way_as_allowed_and_no_more() -> None:
    lock, together, now, most = threading.Lock(), threading.Barrier(3), [0], [0]

    def respond(path: str, body: Any) -> tuple[int, str, Mapping[str, str]]:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        together.wait(30)  # broken, and a fault for its queries, if fewer come
        with lock:
            now[0] -= 1
        return 200, json.dumps(standard_answer(body)), {}

    with http_server(respond) as (url, requests):
        queries = [str(n) for n in range(60)]
        retriever = client(url, batch_queries=2, concurrency=3, protocol="queries")
        assert retriever.search(queries, 1) == [passages_for(query, 1) for query in queries]
    assert most[0] == 3 and len(requests) == 30


# --- which index


def ours(index: list[str]) -> Callable[[str, Any], tuple[int, str, Mapping[str, str]]]:
    def respond(path: str, body: Any) -> tuple[int, str, Mapping[str, str]]:
        if path == "/health":
            facts = {"status": "ok", "index_id": index[0], "corpus_sha256": "c" * 64, "kind": "bm25", "passages": 3}
            return 200, json.dumps(facts), {}
        return 200, json.dumps({**standard_answer(body), "index_id": index[0]}), {}

    return respond


def test_our_server_tells_its_index() -> None:
    with http_server(ours([HASH_A])) as (url, _):
        retriever = client(url, index="a name")
        assert retriever.index_id() == HASH_A and retriever.corpus_sha256() == "c" * 64


@pytest.mark.parametrize(
    "health", [(404, "{}"), (405, "{}"), (500, "{}"), (501, "<html>"), (200, '{"status": "ok"}'), (200, "<html>")]
)
def test_another_server_has_the_configured_name(health: tuple[int, str]) -> None:
    with http_server(lambda path, body: (*health, {})) as (url, _):
        retriever = client(url, index="wiki18-e5")
        assert retriever.index_id() == "wiki18-e5" and retriever.corpus_sha256() is None


def test_a_server_that_is_down_tells_no_index() -> None:
    with pytest.raises(RetrievalFault, match="cannot be reached"):
        client(f"http://127.0.0.1:{closed_port()}", index="name").index_id()


@pytest.mark.parametrize("configured", [HASH_A, HASH_A[:12]])
def test_a_configured_hash_must_be_the_servers(configured: str) -> None:
    with http_server(ours([HASH_A])) as (url, _):
        retriever = client(url, index=configured)
        assert retriever.index_id() == HASH_A and retriever.search(["a"], 1) == [passages_for("a", 1)]
    with http_server(ours([HASH_B])) as (url, _):
        retriever = client(url, index=configured)
        (fault,) = faults(retriever.search(["a"], 1))
        assert configured in str(fault) and HASH_B[:40] in str(fault)
        with pytest.raises(RetrievalFault, match="another index"):
            retriever.index_id()


def test_an_index_that_changes_in_mid_run_is_refused() -> None:
    index = [HASH_A]
    with http_server(ours(index)) as (url, _):
        retriever = client(url)
        assert retriever.search(["a"], 1) == [passages_for("a", 1)]
        index[0] = HASH_B
        (fault,) = faults(retriever.search(["a"], 1))
        index[0] = HASH_A
        assert retriever.search(["a"], 1) == [passages_for("a", 1)]
    assert HASH_A in str(fault) and "another index" in str(fault)


# --- settings


def test_neither_address_nor_patience_is_a_setting_of_the_answers() -> None:
    settings = [client(f"http://127.0.0.1:{port}", index="wiki", timeout_seconds=port).settings for port in (1, 2)]
    assert settings == [{"kind": "http", "index": "wiki"}] * 2


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://a/b", "http://", "http://a:0x/", "http://a b/", "file:///x"]
)
def test_an_address_that_is_none_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.options\.retriever\.url"):
        HttpRetriever(url)


@pytest.mark.parametrize(
    "setting",
    [
        {"retries": -1},
        {"timeout_seconds": 0},
        {"batch_queries": 0},
        {"concurrency": 0},
        {"protocol": "grpc"},
        {"index": " "},
    ],
)
def test_settings_that_cannot_work_are_configuration_errors(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"env\.options\.retriever\.{next(iter(setting))}"):
        HttpRetriever("http://localhost:8000", **setting)


def test_a_proxy_of_the_environment_is_not_used_for_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with http_server(answering(standard_answer)) as (url, _):
        assert client(url).search(["a"], 1) == [passages_for("a", 1)]


def test_a_proxy_of_the_environment_that_cannot_be_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks9://127.0.0.1:1")
    with pytest.raises(ConfigError, match="ALL_PROXY"):
        HttpRetriever("http://gpu-7:8000")
    HttpRetriever("http://127.0.0.1:8000").close()


def test_a_password_in_the_address_is_not_shown() -> None:
    (fault,) = faults(client(f"http://user:secret@127.0.0.1:{closed_port()}").search(["a"], 1))
    assert "secret" not in str(fault)
