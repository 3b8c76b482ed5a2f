"""The Search-R1 protocol on the wire: what a request and an answer look like, in every variant that servers speak.

    POST /retrieve {"queries": [text, ...], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "7", "contents": "\\"Title\\"\\ntext"}, "score": 1.5}, ...], ...]}

Variants that are read: one `query` text instead of `queries`; `results` instead of `result`; for one query a flat list of
entries; entries that are the document itself, with or without a score; documents with `title` and `text`, with `contents`,
or plain text; fewer entries than asked for, or more (cut); a score that is missing or no finite number (0.0). Pure
functions: nothing here touches a socket.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from data.retrieval import Hit, Passage
from data.retrieval.index.passages import split_contents

SHOWN_CHARACTERS = 120  # of foreign text in a message

_ID_KEYS = ("id", "_id", "docid", "doc_id")


class ShapeError(ValueError):
    """An answer that is none of the variants. The message tells what was found, escaped and short.

    `is_json` tells a server with other habits (asking again gives the same) from garbage on the way (a proxy's page).
    """

    def __init__(self, found: str, *, is_json: bool = True) -> None:
        super().__init__(found)
        self.is_json = is_json


def shown(value: object) -> str:
    """Foreign text or JSON for a message: one line, escaped, cut.

    >>> shown("<html>\\n\\x1b[31m")
    "'<html>\\\\n\\\\x1b[31m'"
    """
    if isinstance(value, (str, bytes)):
        text = repr(value)
    else:
        try:
            text = json.dumps(value, ensure_ascii=True, default=str).replace("\x7f", "\\u007f")
        except RecursionError:
            text = f"{type(value).__name__}, deeply nested"
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def clean(text: str) -> str:
    """The text without lone surrogates, which no file and no socket could carry."""
    return text.encode("utf-8", "replace").decode("utf-8")


def many_request(queries: Sequence[str], topk: int) -> dict[str, Any]:
    """The body that asks for several queries; some servers fail unless scores are asked for."""
    return {"queries": [clean(query) for query in queries], "topk": topk, "return_scores": True}


def single_request(query: str, topk: int) -> dict[str, Any]:
    """The body of the variant that takes one query."""
    return {"query": clean(query), "topk": topk, "return_scores": True}


def join_contents(passage: Passage) -> str:
    """The inverse of `data.retrieval.index.passages.split_contents`, as servers of the protocol send it."""
    return f'"{passage.title}"\n{passage.text}'


def response_body(answers: Sequence[Sequence[Hit]], index_id: str | None) -> dict[str, Any]:
    """The answer of our server: the protocol's shape, documents with title and text besides, and the index's id."""
    result = [[{"document": _document(hit.passage), "score": hit.score} for hit in hits] for hits in answers]
    return {"result": result} if index_id is None else {"result": result, "index_id": index_id}


def _document(passage: Passage) -> dict[str, str]:
    return {
        "id": passage.passage_id,
        "title": passage.title,
        "text": passage.text,
        "contents": join_contents(passage),
    }


def read_response(body: bytes, queries: int, topk: int) -> tuple[list[list[Hit]], str | None]:
    """The hits of each of `queries` queries, at most `topk` each, and the index's id if the server tells it.

    Raises ShapeError for anything that is none of the variants, a wrong number of results included.
    """
    answer = read_object(body)
    result = answer.get("result", answer.get("results"))
    if not isinstance(result, list):
        raise ShapeError(f"JSON without a list 'result': {shown(answer)}")
    if queries == 1 and (not result or not isinstance(result[0], list)):
        result = [result]  # a server of the single variant may leave the outer list out
    if len(result) != queries:
        raise ShapeError(f"{len(result)} results for {queries} queries: {shown(answer)}")
    index_id = answer.get("index_id")
    hits = [read_hits(entries)[:topk] for entries in result]
    return hits, index_id if isinstance(index_id, str) and index_id else None


def read_object(body: bytes) -> Mapping[str, Any]:
    """A JSON object. Raises ShapeError for anything else."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        start = body[:SHOWN_CHARACTERS].decode("utf-8", "replace")
        raise ShapeError(f"no JSON: {shown(start)}", is_json=False) from None
    if not isinstance(answer, dict):
        raise ShapeError(f"JSON that is no object: {shown(answer)}")
    return answer


def read_hits(entries: object) -> list[Hit]:
    """The hits of one query, in the server's order. An entry without any text is left out."""
    if not isinstance(entries, list):
        raise ShapeError(f"a result that is no list: {shown(entries)}")
    hits = []
    for entry in entries:
        document = entry.get("document", entry) if isinstance(entry, dict) else entry
        passage = _read_passage(document)
        if passage is not None:
            hits.append(Hit(passage, _read_score(entry)))
    return hits


def _read_passage(document: object) -> Passage | None:
    if isinstance(document, str):
        document = {"contents": document}
    if not isinstance(document, dict) or not any(key in document for key in ("contents", "text")):
        raise ShapeError(f"an entry without 'contents' or 'text': {shown(document)}")
    title, text = document.get("title"), document.get("text")
    if not isinstance(text, str) or not text.strip():
        contents = document.get("contents")
        if not isinstance(contents, str) or not contents.strip():
            return None
        own_title, text = split_contents(contents)
        title = title if isinstance(title, str) and title.strip() else own_title
    title = clean(title) if isinstance(title, str) else ""
    text = clean(text)
    return Passage(_read_id(document, title, text), title, text)


def _read_id(document: Mapping[str, Any], title: str, text: str) -> str:
    for key in _ID_KEYS:
        value = document.get(key)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and str(value):
            return clean(str(value))
    return hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16]


def _read_score(entry: object) -> float:
    try:
        score = float(entry["score"])  # type: ignore[index]
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0.0
    return score if math.isfinite(score) else 0.0
