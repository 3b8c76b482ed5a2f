"""`rsipo index build | show | search | check | serve`: make, look at, ask, prove and serve indexes of passages."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rsipo_cli.options import Quiet

if TYPE_CHECKING:
    from data.retrieval import Hit
    from data.retrieval.index.directory import IndexDirectory

app = typer.Typer(
    help="Build, show, search, check and serve indexes of passages.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Index = Annotated[
    str, typer.Argument(metavar="DIR", help="The directory of an index, or generated:articles=3000,seed=1.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def build(
    passages: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            readable=False,
            help="JSON lines (plain, .gz, .xz) or Parquet; repeatable, read in this order.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The directory to write.")],
    kind: Annotated[str, typer.Option(help="bm25 or dense.")] = "bm25",
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes; default: one for each processor, at most 8.")
    ] = None,
    k1: Annotated[float | None, typer.Option(help="bm25: how soon repeated words stop to count (default 1.5).")] = None,
    b: Annotated[float | None, typer.Option(help="bm25: how much long passages are discounted, 0 to 1 (0.75).")] = None,
    id_column: Annotated[str, typer.Option(help="The column of the ids.")] = "id",
    title_column: Annotated[
        str | None, typer.Option(help="The column of the titles; default: title, or the first line of contents.")
    ] = None,
    text_column: Annotated[
        str | None, typer.Option(help="The column of the texts; default: contents if it is there, else text.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="dense: directory or hub name of the embedding model.")] = None,
    pooling: Annotated[str | None, typer.Option(help="dense: mean or cls (default mean).")] = None,
    query_prefix: Annotated[str | None, typer.Option(help="dense: put before every query; e5: 'query: '.")] = None,
    passage_prefix: Annotated[
        str | None, typer.Option(help="dense: put before every passage; e5: 'passage: '.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="dense: tokens of a text that count (default 256).")] = None,
    normalise: Annotated[
        bool | None, typer.Option("--normalise/--no-normalise", help="dense: vectors of length 1 (default).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Build anew if the index is stale or damaged.")] = False,
    json_: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Build an index of passages; a killed build goes on where it was when the same command runs again."""
    from data.retrieval.index.build import ensure_index
    from data.retrieval.index.corpus import Corpus
    from data.retrieval.index.recipes import recipe_of
    from data.retrieval.index.sources import Columns
    from rsipo_cli.console import make_reporter

    given = {"k1": k1, "b": b, "model": model, "pooling": pooling, "query_prefix": query_prefix}
    given |= {"passage_prefix": passage_prefix, "max_length": max_length, "normalise": normalise}
    recipe = recipe_of(kind, {name: value for name, value in given.items() if value is not None})
    corpus = Corpus.of_files(passages, Columns(id_column, title_column, text_column))
    index, state = ensure_index(corpus, out, recipe, workers, make_reporter(quiet=quiet), force)
    _print(str(out), "up to date" if state == "up_to_date" else "done", _facts(index), json_)


@app.command()
def show(directory: Index, json_: AsJson = False) -> None:
    """Show what an index holds and what it was made with."""
    _print(directory, None, _facts(_open(directory)), json_)


@app.command()
def search(
    directory: Index,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What to look for.")],
    topk: Annotated[int, typer.Option(min=1, metavar="N", help="How many passages at most.")] = 3,
    json_: AsJson = False,
) -> None:
    """Print the passages that answer a query best, best first."""
    from data.retrieval.open_index import retriever_of

    retriever = retriever_of(_open(directory))
    try:
        answer = retriever.search([query], topk)[0]
    finally:
        retriever.close()
    if isinstance(answer, Exception):
        raise answer
    _print_hits(answer, json_)


@app.command()
def check(directory: Index) -> None:
    """Compare every byte of an index with its manifest. Exits with 3 when it is damaged."""
    from rsipo_cli.text import visible

    index = _open(directory)
    index.verify()
    typer.echo(visible(f"{directory}: {index.passages} passages, every byte is right, index {index.index_id}"))


if importlib.util.find_spec("rsipo_cli.serve") is not None:
    app.command("serve")(importlib.import_module("rsipo_cli.serve").serve)


def _open(source: str) -> IndexDirectory:
    from data.search.retrievers import open_index

    return open_index(source)


def _facts(index: IndexDirectory) -> dict[str, Any]:
    settings = dict(index.settings)
    if "stop_words" in settings:
        settings["stop_words"] = " ".join(settings["stop_words"])
    return {
        "kind": index.kind,
        "passages": index.passages,
        "megabytes": round(index.bytes / 1e6, 1),
        "index_id": index.index_id,
        "corpus_sha256": index.corpus_sha256,
        **index.figures,
        **index.sources,
        "setting": {name: value for name, value in settings.items() if name != "kind"},
    }


def _print(directory: str, state: str | None, facts: dict[str, Any], as_json: bool) -> None:
    from rsipo_cli.console import json_text, print_facts

    if as_json:
        typer.echo(json_text({"directory": directory, **({"state": state} if state else {}), **facts}))
        return
    print_facts(f"{directory}: {state}" if state else directory, facts)


def _print_hits(hits: list[Hit], as_json: bool) -> None:
    from rsipo_cli.console import json_text
    from rsipo_cli.text import visible

    if as_json:
        rows = [
            {"id": hit.passage.passage_id, "title": hit.passage.title, "text": hit.passage.text, "score": hit.score}
            for hit in hits
        ]
        typer.echo(json_text(rows))
        return
    if not hits:
        typer.echo("no passage was found")
    for number, hit in enumerate(hits, 1):
        passage = hit.passage
        typer.echo(visible(f"{number}. {passage.title or '(no title)'}  [{passage.passage_id}, score {hit.score:.4f}]"))
        typer.echo(f"   {visible(passage.text)}")
