"""`rsipo tasks` beyond the household: building, listing and checking question panels and panels of other environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from data.panel_lines import read_lines
from data.retrieval import Answer, Hit, Passage, RetrievalFault
from data.search.panels import load_panel
from data.search.question_checks import Recall, holds_answer, question_faults, recall_by_set, repeated_questions
from data.search.question_table import read_questions, write_questions
from data.tasks import Panel, Task
from rsipo_cli import task_panels
from rsipo_cli.tasks import app
from schemas.errors import ConfigError, EnvironmentFault, RsipoError

GENERATED = "generated:articles=300,seed=1,split=train,count=12"
ELSEWHERE = "tests.test_search_tasks_cli:Elsewhere"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(*arguments: object) -> RsipoError:
    """The error that a command ends with."""
    result = run(*arguments)
    assert isinstance(result.exception, RsipoError), result.output
    return result.exception


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    content = [{"question": f"who wrote book {number}?", "answer": [f"Author {number}"]} for number in range(9)]
    path.write_text("\n".join(map(json.dumps, content)))
    return path


# --- build


def test_build_list_and_check_agree_on_a_question_panel(tmp_path: Path) -> None:
    panel = load_panel(GENERATED)
    out = tmp_path / "q.parquet"
    built = run("build", GENERATED, "--env", "search", "--out", out)
    assert built.exit_code == 0 and panel.sha256 in built.stdout and "12 questions" in built.stdout
    listed = json.loads(run("list", "--env", "search", out, "--json").stdout)
    assert listed["sha256"] == panel.sha256 and listed["count"] == listed["questions"] == 12
    assert [row["id"] for row in listed["tasks"]] == [task.task_id for task in panel]
    assert sum(listed["labels"]["hops"].values()) == 12 == sum(listed["types"].values())
    checked = run("check", "--env", "search", out)
    assert checked.exit_code == 0 and f"12 of 12 questions are good; sha256 {panel.sha256}" in checked.stdout


def test_a_listing_shows_counts_by_type_and_by_hops() -> None:
    lines = run("list", "--env", "search", GENERATED).stdout.splitlines()
    assert len(lines) == 12 + 3
    assert lines[-1].startswith("hops: 1 ") and all(len(line.split("\t")) == 5 for line in lines[:12])


def test_data_sets_are_built_from_local_copies_as_the_source_string_does(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "q.parquet"
    options = ("--count", 3, "--seed", 5, "--out", out)
    built = run("build", "--env", "search", "--set", f"nq:test={rows}", "--set", f"nq:dev={rows}", *options)
    assert built.exit_code == 0, built.exception
    same = load_panel(f"sets:nq:test={rows}+nq:dev={rows},count=3,seed=5")
    assert [task.sha256 for task in read_questions(out)] == [task.sha256 for task in same] and len(same) == 6
    before = out.read_bytes()
    assert run("build", same.name, "--env", "search", "--out", out).exit_code == 0
    assert out.read_bytes() == before


def test_columns_hub_and_bad_rows_reach_the_source(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    own, out = tmp_path / "own.jsonl", tmp_path / "q.parquet"
    own.write_text('{"query": "who?", "gold": "Ada"}\n{"query": "", "gold": "Bo"}\n')
    columns = ("--columns", "question=query,answers=gold")
    assert refusal("build", "--env", "search", "--set", f"mine:dev={own}", *columns, "--out", out).exit_code == 3
    assert (
        run("build", "--env", "search", "--set", f"mine:dev={own}", *columns, "--skip-bad", "--out", out).exit_code == 0
    )
    assert [task.text for task in read_questions(out)] == ["who?"]
    asked = []
    found = [{"id": "1", "question": "q", "golden_answers": ["x"]}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **_: asked.append(names) or found)
    run("build", "--env", "search", "--set", "nq:test", "--hub", "flashrag", "--out", out)
    assert asked == [("RUC-NLPIR/FlashRAG_datasets", "nq")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build", "--env", "search", "--out", "q.parquet"), "SOURCE, or --set"),
        (("build", GENERATED, "--set", "nq:dev", "--env", "search", "--out", "q.parquet"), "SOURCE, or --set"),
        (("build", GENERATED, "--env", "search", "--out", "q.jsonl"), "*.parquet"),
        (("build", "generated:count=2", "--out", "q.parquet"), "*.jsonl or *.xz"),
        (("build", "--set", "nq:dev", "--out", "q.jsonl"), "data sets are questions"),
        (("build", GENERATED, "--env", "search", "--count", "3", "--out", "q.parquet"), "need --set"),
        (("build", "--set", "ngq:dev", "--env", "search", "--out", "q.parquet"), "did you mean nq?"),
        (("list", GENERATED, "--env", "serach"), "unknown environment"),
        (("list", GENERATED, "--env", "no_such_module:Thing"), "cannot import"),
        (("check", GENERATED, "--env", "search", "--stock"), "--stock belongs to another environment"),
        (("check", "generated:count=2", "--index", "somewhere"), "--index belongs to another environment"),
    ],
)
def test_arguments_that_cannot_be_are_refused_with_exit_code_two(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refusal(*arguments)
    assert error.exit_code == 2 and message in str(error)
    assert not list(tmp_path.iterdir())


def test_a_household_panel_is_built_from_any_of_its_sources(tmp_path: Path) -> None:
    out = tmp_path / "games.jsonl.xz"
    assert run("build", "generated:count=2,size=small", "--out", out).exit_code == 0
    listed = run("list", out)
    assert listed.exit_code == 0 and "2 games, sha256 " in listed.stdout and "hops" not in listed.stdout


def test_a_listing_escapes_control_characters_of_questions_ids_and_labels(tmp_path: Path) -> None:
    task = Task("nq/dev/\x1b[1m", "nq\x07", "dev", "red \x1b[31m\n one\u202e", {"answers": ["x"]}, {"hops": "\x9b2"})
    write_questions([task], tmp_path / "q.parquet")
    for command in ("list", "check"):
        shown = run(command, "--env", "search", tmp_path / "q.parquet").output
        assert not set(shown) & set("\x1b\x07\x9b\u202e") and "2" in shown


# --- check


def test_check_names_unusable_questions_and_exits_with_one(tmp_path: Path) -> None:
    tasks = [
        Task("nq/dev/1", "nq", "dev", "The a?", {"answers": ["x"]}),
        Task("nq/dev/2", "nq", "dev", "Who?", {"answers": ["x", "..."]}),
        Task("nq/dev/3", "nq", "dev", "who", {"answers": ["y"]}),
    ]
    write_questions(tasks, tmp_path / "q.parquet")
    result = run("check", "--env", "search", tmp_path / "q.parquet")
    assert result.exit_code == 1 and "1 of 3 questions are good" in result.stdout
    assert "bad: nq/dev/1: the question is nothing but articles" in result.stdout
    assert "bad: nq/dev/2: the gold answer '...'" in result.stdout
    assert "1 questions are asked before under another id: nq/dev/3 asks what nq/dev/2 does" in result.stderr


class Shelf:
    """A retriever whose passages are found by the first word of the query; the query `down` fails."""

    settings: dict[str, object] = {}

    def __init__(self, passages: dict[str, Passage]) -> None:
        self.passages, self.batches = passages, []

    def index_id(self) -> str:
        return "shelf"

    def search(self, queries: list[str], topk: int) -> list[Answer]:
        self.batches.append(len(queries))
        found: list[Answer] = []
        for query in queries:
            word = query.split()[0]
            passage = self.passages.get(word)
            down = RetrievalFault("the server is down")
            found.append(down if word == "down" else [] if passage is None else [Hit(passage, 1.0)][:topk])
        return found

    def close(self) -> None:
        pass


def question(number: int, text: str, *answers: str, data_set: str = "nq") -> Task:
    return Task(f"{data_set}/dev/{number:04d}", data_set, "dev", text, {"answers": list(answers)})


def test_recall_counts_whole_normalised_words_in_title_or_text_by_data_set() -> None:
    shelf = Shelf({"red": Passage("1", "The Red Book", "By Ada Lund, 1999."), "blue": Passage("2", "Blue", "Bolund.")})
    tasks = [
        question(1, "red who", "ada lund"),
        question(2, "red title", "red book"),
        question(3, "blue part", "lund"),
        question(4, "green", "x"),
        question(5, "red other", "x", "A. 1999!", data_set="popqa"),
    ]
    advanced: list[int] = []
    assert recall_by_set(shelf, tasks, 3, advance=advanced.append) == [Recall("nq", 4, 2), Recall("popqa", 1, 1)]
    assert sum(advanced) == 5 and Recall("nq", 4, 2).share == 0.5
    assert not holds_answer([Hit(shelf.passages["red"], 1.0)], ["the"])


def test_recall_asks_many_questions_at_once_and_passes_a_fault_on() -> None:
    shelf = Shelf({})
    recall_by_set(shelf, [question(number, "x", "y") for number in range(130)], 1)
    assert len(shelf.batches) < 10 and sum(shelf.batches) == 130
    with pytest.raises(EnvironmentFault, match="down"):
        recall_by_set(shelf, [question(1, "down", "y")], 1)


def test_an_index_tells_how_often_it_finds_a_gold_answer(tmp_path: Path) -> None:
    from data.retrieval.index.build import build_index_from
    from data.search.encyclopaedia import generate_world

    build_index_from(generate_world(1, 300).passages, tmp_path / "index")
    result = run("check", "--env", "search", f"{GENERATED},hops=1", "--index", tmp_path / "index", "--topk", 300)
    assert result.exit_code == 0, result.exception
    figures = [line for line in result.stdout.splitlines() if line.startswith("recall@300 ")]
    assert figures and all(" 1.000 (" in line for line in figures)
    other = run("check", "--env", "search", GENERATED.replace("seed=1", "seed=2"), "--index", tmp_path / "index")
    assert other.exit_code == 1 and "0 of 12 questions are good" in other.stdout
    assert other.stdout.count("it belongs to another corpus than") == 12 and "recall" not in other.stdout
    assert refusal("check", "--env", "search", GENERATED, "--index", tmp_path / "absent").exit_code == 3


def test_faults_and_repetitions_are_found_by_what_scoring_leaves() -> None:
    assert question_faults(question(1, "Who?", "x")) == []
    assert len(question_faults(question(1, "the", "an", "."))) == 3
    assert question_faults(Task("a", "nq", "dev", "who", {})) == ["there is no gold answer"]
    tasks = [
        question(1, "Who is it?", "x"),
        question(2, "who is", "x"),
        question(3, "The who is it", "y", data_set="z"),
    ]
    assert repeated_questions(tasks) == [(tasks[0], tasks[2])]


# --- other environments


class Start:
    """A session that tells the count of starts as its fingerprint where its task is fickle."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def close(self) -> None:
        pass


class Elsewhere:
    """An environment of three tasks: one starts the same every time, one does not, one not at all."""

    name = version = "elsewhere"

    def __init__(self) -> None:
        self.starts = 0

    def start(self, task: Task) -> Start:
        self.starts += 1
        if task.task_id == "broken":
            raise EnvironmentFault("no such world", where=task.task_id)
        return Start(str(self.starts) if task.task_id == "fickle" else task.sha256)

    def panel(self, source: str, *, limit: int | None = None) -> Panel:
        return Panel.of(
            source, [Task(name, "kind", source, f"do {name}", {}, {"level": "1"}) for name in source.split("+")]
        )


def test_another_environment_lists_builds_and_checks_its_own_sources(tmp_path: Path) -> None:
    out = tmp_path / "panel.jsonl"
    assert run("build", "steady+fickle", "--env", ELSEWHERE, "--out", out).exit_code == 0
    assert [task.task_id for task in read_lines(out)] == ["fickle", "steady"]
    listed = run("list", "steady+fickle", "--env", ELSEWHERE, "--limit", 1).stdout
    assert "1 tasks, sha256" in listed and "level: 1 1" in listed
    assert run("check", "steady", "--env", ELSEWHERE).exit_code == 0
    checked = run("check", "steady+fickle+broken", "--env", ELSEWHERE)
    assert checked.exit_code == 1 and "1 of 3 tasks are good" in checked.stdout
    assert "bad: fickle: it does not start the same twice" in checked.stdout
    assert "bad: broken: no such world" in checked.stdout


def test_a_question_table_without_its_environment_and_an_unknown_environment_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add --env search"):
        task_panels.load_panel("household", "questions.parquet", None)
    with pytest.raises(ConfigError, match="unknown environment.*household, search"):
        task_panels.check_suffix("foo", tmp_path / "m.parquet")
