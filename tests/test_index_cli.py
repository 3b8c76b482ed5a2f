"""`rsipo index`: what is printed, where, and how commands end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rsipo_cli.app import app
from schemas.errors import ArtifactError, ConfigError

RUNNER = CliRunner()
ROWS = [
    {"id": "1", "title": "Mount Aru", "text": "A high mountain in the north."},
    {"id": "2", "title": "\x1b[31mRed\x1b[0m", "text": "A [bold]red[/bold] house\x07 near the mountain.\nIt burns."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def run(*arguments: object) -> str:
    result = RUNNER.invoke(app, ["index", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def build(corpus: Path, *more: object) -> str:
    return run("build", "--passages", corpus, "--out", corpus.parent / "out", *more)


def test_building_twice_says_done_and_then_up_to_date(corpus: Path) -> None:
    assert build(corpus).splitlines()[0].endswith("out: done")
    assert build(corpus, "--workers", 1).splitlines()[0].endswith("out: up to date")


def test_build_and_show_agree_as_json(corpus: Path) -> None:
    made = json.loads(build(corpus, "--json", "--k1", "1.2"))
    shown = json.loads(run("show", corpus.parent / "out", "--json"))
    assert made.pop("state") == "done"
    assert made == shown
    assert (shown["kind"], shown["passages"], shown["setting"]["k1"]) == ("bm25", 2, 1.2)
    assert len(shown["index_id"]) == len(shown["corpus_sha256"]) == 64


def test_show_names_the_settings(corpus: Path) -> None:
    build(corpus)
    text = run("show", corpus.parent / "out")
    for part in ("passages", "index_id", "corpus_sha256", "setting k1", "0.75", "lucene"):
        assert part in text


def test_search_prints_the_best_first_and_nothing_dangerous(corpus: Path) -> None:
    build(corpus)
    text = run("search", corpus.parent / "out", "mountain red house")
    assert text.splitlines()[0].startswith("1. Red  [2, score ")
    assert "[bold]red[/bold] house near the mountain. It burns." in text
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.index("Red") < text.index("Mount Aru")
    assert "Mount" not in run("search", corpus.parent / "out", "red mountain", "--topk", 1)


def test_search_gives_json(corpus: Path) -> None:
    build(corpus)
    found = json.loads(run("search", corpus.parent / "out", "aru", "--json"))
    assert [{name: row[name] for name in ("id", "title", "text")} for row in found] == ROWS[:1]
    assert found[0]["score"] > 0


def test_a_search_without_answer_says_so(corpus: Path) -> None:
    build(corpus)
    assert run("search", corpus.parent / "out", "unknown the") == "no passage was found\n"
    assert run("search", corpus.parent / "out", "unknown", "--json") == "[]\n"


def test_check_reads_every_byte(corpus: Path) -> None:
    build(corpus)
    out = corpus.parent / "out"
    assert "every byte is right" in run("check", out)
    path = out / "passages.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ArtifactError, match="passages.bin"):
        run("check", out)


def test_columns_and_several_files_are_given_by_options(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text('{"key": "1", "head": "T", "body": "aru"}\n')
    second.write_text('{"key": "2", "head": "U", "body": "berg"}\n')
    columns = ("--id-column", "key", "--title-column", "head", "--text-column", "body")
    run("build", "--passages", first, "--passages", second, "--out", tmp_path / "out", *columns, "-q")
    assert json.loads(run("search", tmp_path / "out", "u", "--json")) == []
    assert json.loads(run("search", tmp_path / "out", "berg", "--json"))[0]["title"] == "U"


def test_progress_goes_to_stderr_and_quiet_silences_it(corpus: Path) -> None:
    arguments = ["index", "build", "--passages", str(corpus), "--out", str(corpus.parent / "out")]
    loud = RUNNER.invoke(app, arguments, catch_exceptions=False)
    assert "passages 2" in loud.stderr
    assert "reading passages" not in loud.stdout
    assert RUNNER.invoke(app, [*arguments, "-q"], catch_exceptions=False).stderr == ""


def test_bad_input_ends_with_the_errors_that_carry_exit_codes(corpus: Path) -> None:
    out = corpus.parent / "out"
    with pytest.raises(ConfigError, match="bm25 or dense"):
        build(corpus, "--kind", "fuzzy")
    with pytest.raises(ConfigError, match="no such setting"):
        build(corpus, "--pooling", "cls")
    with pytest.raises(ArtifactError, match="no column key"):
        build(corpus, "--id-column", "key")
    assert not out.exists()
    assert RUNNER.invoke(app, ["index", "build", "--out", str(out)]).exit_code == 2
    assert RUNNER.invoke(app, ["index", "build", "--passages", str(corpus)]).exit_code == 2
    for missing in (out, "~no-such-user/index"):
        with pytest.raises(ArtifactError, match="there is no index here"):
            run("show", missing)
    with pytest.raises(ArtifactError, match="cannot be read"):
        run("build", "--passages", "~no-such-user/corpus.jsonl", "--out", out)
