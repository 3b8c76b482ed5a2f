"""Panel sources of the search environment: generated questions, tables, and the options that both worlds share."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.panel_lines import read_lines, write_lines
from data.panel_sources import limit_panel, parse_options
from data.search.panels import load_panel, parse_generated, parse_world, write_panel
from data.tasks import Panel, Task
from schemas.errors import ArtifactError, ConfigError

GENERATED = "generated:articles=300,seed=1,split=train,count=24"


def test_a_generated_panel_is_a_function_of_its_source_and_survives_a_table(tmp_path: Path) -> None:
    panel = load_panel(GENERATED)
    assert len(panel) == 24 and panel.sha256 == load_panel(GENERATED).sha256
    write_panel(panel, tmp_path / "q.parquet")
    again = load_panel(str(tmp_path / "q.parquet"))
    assert again.tasks == panel.tasks and again.sha256 == panel.sha256


def test_hops_choose_the_questions_and_draw_takes_others_of_the_same_world() -> None:
    single, double = load_panel(f"{GENERATED},hops=1"), load_panel(f"{GENERATED},hops=2")
    assert {task.labels["hops"] for task in single} == {"1"} and {task.labels["hops"] for task in double} == {"2"}
    other = load_panel(f"{GENERATED},draw=1")
    assert other.sha256 != load_panel(GENERATED).sha256
    assert {task.payload["corpus"] for task in other} == {task.payload["corpus"] for task in single}


def test_an_index_source_names_the_world_of_a_panel_source() -> None:
    assert parse_world("generated:articles=300,seed=7") == (300, 7)
    assert parse_world("generated:articles=300")[1] == int(parse_generated("generated:count=1")["seed"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("generated:articles=300", "count is missing"),
        ("generated:count=3,artcles=9", "did you mean articles?"),
        ("generated:count=3,articles=", "no value"),
        ("generated:count=3,count=3", "twice"),
        ("generated:count=3,articles=many", "articles is not a number"),
        ("generated:count=3,hops=1+x", "hops is not a number"),
        ("generated:count=3,hops=7", "unknown number of hops"),
        ("generated:count=3,split=dev", "unknown split"),
        ("generated:count=3,articles=1", "so many articles"),
        ("questions.jsonl", "unknown source of questions"),
        ("", "unknown source of questions"),
    ],
)
def test_a_source_that_cannot_be_is_refused_with_exit_code_two(source: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_panel(source)
    assert message in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("source", ["generated:seed=1", "generated:articles=3,split=train", "generated:"])
def test_an_index_source_holds_the_world_and_nothing_else(source: str) -> None:
    with pytest.raises(ConfigError):
        parse_world(source)


def test_options_may_be_absent_only_where_they_are_optional() -> None:
    settings = {"defaults": {"seed": "0"}, "optional": ("hub",), "required": ("count",), "example": "x:count=1"}
    assert parse_options("count=2", "x", **settings) == {"seed": "0", "count": "2"}
    assert parse_options("count=2,hub=a,seed=3", "x", **settings) == {"seed": "3", "hub": "a", "count": "2"}
    with pytest.raises(ConfigError, match="as in x:count=1"):
        parse_options("hub=a", "x", **settings)


def test_lines_of_tasks_survive_the_round_trip_with_labels_and_line_separators(tmp_path: Path) -> None:
    tasks = [
        Task("a", "kind", "dev", "one\u2028 line\u0085", {"state": {"x": [1, "\u2029"]}}, {"hops": "2"}),
        Task("b", "kind", "dev", "two", {}),
    ]
    panel = Panel.of("panel", tasks)
    for name in ("panel.jsonl", "panel.jsonl.xz"):
        write_lines(panel, tmp_path / name)
        assert read_lines(tmp_path / name, "panel").tasks == panel.tasks
        assert read_lines(tmp_path / name).sha256 == panel.sha256
    (tmp_path / "panel.jsonl").write_text('{"task_id": "a"}\n')
    with pytest.raises(ArtifactError, match=r"damaged task.*line 1"):
        read_lines(tmp_path / "panel.jsonl")
    (tmp_path / "panel.jsonl.xz").write_bytes(b"no xz")
    with pytest.raises(ArtifactError, match="cannot read a panel"):
        read_lines(tmp_path / "panel.jsonl.xz")


def test_a_limit_holds_for_search_panels_too() -> None:
    panel = load_panel(GENERATED)
    assert load_panel(GENERATED, limit=3).tasks == panel.tasks[:3]
    assert load_panel(GENERATED, limit=4, spread=True).tasks == limit_panel(panel, 4, spread=True).tasks
    with pytest.raises(ConfigError, match="limit"):
        load_panel(GENERATED, limit=0)
