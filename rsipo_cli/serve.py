"""`rsipo index serve`: share one index with other processes over HTTP."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rsipo_cli import options


def serve(
    index: Annotated[
        str, typer.Option("--index", metavar="DIR", help="The index directory, or generated:articles=3000,seed=1.")
    ],
    host: Annotated[str, typer.Option("--host", help="The address to listen on; anyone who reaches it can ask.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0 takes a free one.")] = 8000,
    topk: Annotated[int, typer.Option("--topk", min=1, help="Passages where a request names no number.")] = 3,
    max_topk: Annotated[int, typer.Option("--max-topk", min=1, help="Most passages of a query.")] = 100,
    max_queries: Annotated[int, typer.Option("--max-queries", min=1, help="Most queries of a request.")] = 512,
    max_concurrency: Annotated[
        int | None,
        typer.Option("--max-concurrency", min=1, help="Retrievals at a time; default: one for each processor."),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", min=0, help="Requests that may wait; more are refused with status 503.")
    ] = 256,
    as_json: options.AsJson = False,
) -> None:
    """Serve an index by the Search-R1 protocol until stopped: POST /retrieve, GET /health."""
    from data.retrieval.http.server import IndexInfo, create_app, listen, run_server, url_of
    from data.retrieval.open_index import retriever_of
    from data.search.retrievers import open_index
    from rsipo_cli.console import json_text
    from rsipo_cli.failures import Stopped
    from rsipo_cli.text import visible
    from schemas.errors import ConfigError

    if topk > max_topk:
        raise ConfigError("more passages than allowed", where="--topk", expected=f"at most {max_topk}", found=topk)
    directory = open_index(index)
    retriever = retriever_of(directory)
    info = IndexInfo(directory.index_id, directory.corpus_sha256, directory.kind, directory.passages)
    app = create_app(
        retriever,
        info,
        max_concurrency=max_concurrency or len(os.sched_getaffinity(0)),
        max_waiting=max_waiting,
        max_queries=max_queries,
        max_topk=max_topk,
        default_topk=topk,
    )
    listener = listen(host, port)
    url = url_of(listener)
    if not _is_loopback(listener.getsockname()[0]):
        typer.echo(
            f"rsipo: {visible(url)} may be reached from other machines, and nobody is asked who they are", err=True
        )

    def ready() -> None:
        if as_json:
            facts = {"url": f"{url}/retrieve", "index_id": info.index_id, "corpus_sha256": info.corpus_sha256}
            typer.echo(json_text({**facts, "kind": info.kind, "passages": info.passages}))
        else:
            typer.echo(visible(f"serving {url}/retrieve, index {info.index_id}, {info.passages} passages"))

    try:
        run_server(app, listener, ready=ready)
    except Stopped as stop:  # the usual way to end a server; there is nothing that would continue
        typer.echo("rsipo: stopped serving", err=True)
        raise typer.Exit(128 + stop.number) from None
    finally:
        retriever.close()


def _is_loopback(address: str) -> bool:
    import ipaddress

    return ipaddress.ip_address(address).is_loopback
