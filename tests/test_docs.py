"""The pages of docs/ say what is: examples run, generated parts are up to date, tables and options are the program's."""

from __future__ import annotations

import doctest
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from data.environments import EnvironmentSpec
from rsipo_cli.app import app
from schemas import config_docs
from schemas.config import Config
from schemas.run_directory import RunDirectory
from schemas.table_io import finish_step, write_part
from schemas.tables import SCHEMAS
from stages.episodes import EpisodeJob, Limits, play
from stages.rendering import Renderer, turn_prompt_ids
from tests.doc_examples import DOCS, ScriptedEngine, example

PAGES = sorted(DOCS.glob("*.md"))


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)


# --- every page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_and_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_and_modules_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:tests|stages|schemas|data|benchmarks|rsipo_cli)/[\w/.-]+?)(?:::(?:\w+))?`", text):
        assert (DOCS.parent / name).exists(), name
    for file, test in re.findall(r"`(tests/\w+\.py)::(\w+)`", text):
        assert f"def {test}(" in (DOCS.parent / file).read_text(encoding="utf-8"), test


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_of_a_page_are_accepted(page: Path) -> None:
    group = typer.main.get_command(app)
    for block in blocks(page.name, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["rsipo"]:
                parse(group, words[1:])


def parse(command: Any, words: Sequence[str], parent: Any = None) -> None:
    """Parse a command line without running it; what the program would refuse raises."""
    inner = getattr(command, "commands", {}).get(words[0]) if words else None
    if inner is not None:
        parse(inner, words[1:], command.make_context(command.name or "rsipo", [words[0]], parent=parent))
        return
    assert not getattr(command, "commands", {}) or words[0].startswith("-"), f"no such command: {words}"
    if words != ["--version"] and words != ["--install-completion"]:  # these act when they are parsed
        command.make_context(command.name, list(words), parent=parent)


def test_the_check_of_command_lines_refuses_what_the_program_refuses() -> None:
    group = typer.main.get_command(app)
    for words in (["rollout"], ["loop", "--stepps", "3"], ["tasks", "chek", "x"], ["loop", "--steps", "0"]):
        with pytest.raises(Exception, match="."):
            parse(group, words)


# --- commands


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command below `command` with its full name."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    for word, found in inner.items():
        yield from commands(found, f"{name} {word}".strip())


@pytest.mark.parametrize(
    ("name", "command"),
    list(commands(typer.main.get_command(app))),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_commands_page_has_a_section_with_every_option_of_a_command(name: str, command: Any) -> None:
    sections = dict(re.findall(r"^##+ ([\w -]+)\n(.*?)(?=^##+ |\Z)", text_of("commands.md"), re.DOTALL | re.MULTILINE))
    own = {option for parameter in command.params for option in parameter.opts if option.startswith("--")} - {"--help"}
    named = set(re.findall(r"`(--[\w-]+)", sections[name]))
    assert own - named == set(), "options that the page does not name"
    switches = {option for parameter in command.params for option in parameter.secondary_opts}
    assert named - own - switches <= {"--run", "--out"}, "options that do not exist"


def test_the_commands_page_lists_the_exit_codes_of_the_error_classes() -> None:
    from schemas import errors

    codes = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")}
    listed = {int(code) for code in re.findall(r"^\| (\d) \| ", text_of("commands.md"), re.MULTILINE)}
    assert codes | {0} == listed


# --- configuration


def test_the_configuration_page_is_up_to_date() -> None:
    remedy = "run: python -m schemas.config_docs > docs/configuration.md"
    assert text_of("configuration.md") == config_docs.page(), remedy


# --- method


def test_examples_of_the_method_page_hold() -> None:
    found = doctest.testfile(str(DOCS / "method.md"), module_relative=False)
    assert found.attempted >= 20 and found.failed == 0


# --- record

TYPE_NAMES = {
    "large_string": "text",
    "bool": "bool",
    "float": "float32",
    "double": "float64",
    "int32": "int32",
    "int64": "int64",
    "large_list<item: int32>": "list of int32",
    "large_list<item: float>": "list of float32",
    "large_list<item: large_string>": "list of text",
    "map<large_string, double>": "map of text to float64",
    "map<large_string, large_string>": "map of text to text",
}


def documented_tables() -> Iterator[tuple[list[str], list[tuple[str, str, str]]]]:
    """Every heading of the record page that names tables, with the columns below it: name, type, null."""
    for section in text_of("record.md").split("\n### ")[1:]:
        heading, _, body = section.partition("\n")
        rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (yes|no) \| [^|]+ \|$", body, re.MULTILINE)
        yield re.findall(r"`(\w+)`", heading), rows


def test_the_record_page_lists_every_column_of_every_table_with_its_type() -> None:
    documented = {name: rows for names, rows in documented_tables() for name in names}
    assert set(documented) == set(SCHEMAS)
    for name, schema in SCHEMAS.items():
        expected = [(field.name, TYPE_NAMES[str(field.type)], "yes" if field.nullable else "no") for field in schema]
        assert documented[name] == expected, name


SAMPLE: Mapping[str, Any] = {"text": "x", "bool": True, "float32": 0.5, "float64": 0.5, "int32": 1, "int64": 1}
PAIRS: Mapping[str, Any] = {"map of text to float64": [("f1", 0.5)], "map of text to text": [("hops", "2")]}
IDS = {"episode_id": "r-1", "task_id": "t", "task_type": "heat", "skill_id": "s-1", "source_episode_id": "r-1"}


def sample_row(table: str, /, **changes: object) -> dict[str, Any]:
    """One row of a table that fits its schema and joins to the sample rows of the others."""
    row: dict[str, Any] = {}
    for field in SCHEMAS[table]:
        kind = TYPE_NAMES[str(field.type)]
        if kind in PAIRS:
            row[field.name] = PAIRS[kind]
            continue
        value = SAMPLE[kind.removeprefix("list of ")]
        row[field.name] = [value] if kind.startswith("list") else value
    return row | {key: value for key, value in IDS.items() if key in row} | changes


def test_queries_of_the_record_page_find_rows_in_a_record(tmp_path: Path) -> None:
    import duckdb

    run = RunDirectory.create(tmp_path / "run", Config())
    changes: dict[str, dict[str, object]] = {
        "train_rows": {"kind": "rollout"},
        "train_metrics": {"name": "groups/zero_variance_share"},
        "timings": {"name": "total_seconds"},
        "replays": {"episode_id": "p-1"},
        "evals": {"episode_id": "e-1"},
    }
    for name in SCHEMAS:
        write_part(run, 1, 0, {name: [sample_row(name, **changes.get(name, {}))]}, "inputs")
        if name != "timings":
            finish_step(run, [name], 1, kind="test", inputs={})
    queries = blocks("record.md", "sql")
    assert len(queries) >= 5
    for query in queries:
        assert duckdb.sql(query.replace("RUN/", f"{run.root}/")).fetchall(), query


# --- environments


@pytest.mark.parametrize("mode", ["window", "append_only"])
def test_the_example_environment_plays_as_it_stands(
    mode: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = example("environments.md", "guessing.py")
    assert len(code.splitlines()) < 80
    (tmp_path / "guessing.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    environment = EnvironmentSpec("guessing:GuessingEnvironment").build()
    panel = environment.panel("count=20")
    task = next(task for task in panel if task.payload["secret"] == 12)
    renderer = Renderer(tokenizer, environment.prompts, mode, 3, False)
    script = ["<guess>10</guess>", "it is 15", "<guess>12</guess>"]
    skill = "Halve what is left each time."
    records = [
        play(
            ScriptedEngine(tokenizer, renderer, script),  # type: ignore[arg-type]
            environment,
            renderer,
            [EpisodeJob(task, 0, 7, chosen, chosen and "s", "e")],
            limits=Limits(max_turns=5, max_prompt_tokens=4000, max_reply_tokens=64, max_episode_tokens=4000),
            temperature=1.0,
        )[0]
        for chosen in (None, skill)
    ]
    for record in records:
        assert record.error is None and record.won is True and record.stop_reason == "done"
        assert [turn.action for turn in record.turns] == ["10", None, "12"] and record.invalid_turns == 1
    student, teacher = records
    assert student.fingerprint == teacher.fingerprint
    for place, turn in enumerate(student.turns):
        plain = turn_prompt_ids(renderer, task, student.turns[:place], turn, None)
        taught = turn_prompt_ids(renderer, task, student.turns[:place], turn, skill)
        assert plain == list(turn.prompt_token_ids)
        assert (skill in renderer.decode(taught)) == (mode == "window" or place == 0)


# --- architecture


@pytest.mark.parametrize(
    ("package", "above"), [("schemas", ("data", "stages", "rsipo_cli")), ("data", ("stages", "rsipo_cli")), ("stages", ("rsipo_cli",))]
)  # fmt: skip
def test_packages_know_only_those_below_them(package: str, above: tuple[str, ...]) -> None:
    upward = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(above)})\b", re.MULTILINE)
    files = sorted((DOCS.parent / package).rglob("*.py"))
    assert files and [path for path in files if upward.search(path.read_text(encoding="utf-8"))] == []
