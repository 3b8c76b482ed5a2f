"""The seven question sets, each in its own columns and in FlashRAG's: what becomes of a row, what is refused and counted."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.search.panels import load_panel, parse_sets
from data.search.question_rows import subsample
from data.search.question_sets import FLASHRAG_HUB, SETS
from data.tasks import Task
from schemas.errors import ArtifactError, ConfigError, RsipoError

# Two rows of each set as its own files have them: the second one differs in what decides the hop class.
OWN: Mapping[str, list[dict[str, Any]]] = {
    "nq": [
        {"question": "who wrote the red book", "answer": ["Ada Lund", "A. Lund"]},
        {"question": "when was it written", "answer": ["2009-05-01"]},
    ],
    "triviaqa": [
        {
            "question_id": f"tc_{number}",
            "question": f"Which river runs through town {number}?",
            "question_source": "http://example.org",
            "answer": {
                "aliases": ["Thames", "River Thames"],
                "normalized_aliases": ["thames", "river thames"],
                "value": "Thames",
                "type": "WikipediaEntity",
            },
        }
        for number in (1, 2)
    ],
    "popqa": [
        {"id": 42, "subj": "Ada Lund", "prop": "occupation", "question": "What is Ada Lund's job?",
         "possible_answers": '["writer", "author"]', "s_pop": 7},
        {"id": 43, "subj": "Bo Ek", "prop": "occupation", "question": "What is Bo Ek's job?",
         "possible_answers": '["politician"]', "s_pop": 8},
    ],
    "hotpotqa": [
        {"id": "5a8b", "question": "Which is older, A1 or B2?", "answer": "yes", "type": "comparison", "level": "hard",
         "supporting_facts": {"title": ["A1"], "sent_id": [0]}, "context": {"title": ["A1"], "sentences": [["It is."]]}},
        {"id": "5a8c", "question": "Who led the band of Bo Ek?", "answer": "Ada Lund", "type": "new", "level": "easy",
         "supporting_facts": {"title": ["B"], "sent_id": [0]}, "context": {"title": ["B"], "sentences": [["Bo."]]}},
    ],
    "2wikimultihopqa": [
        {"_id": "88f1", "type": "bridge_comparison", "question": "Whose director died first?", "answer": "Film X",
         "evidences": [["Film X", "director", "Ada"]]},
        {"_id": "88f2", "type": "inference", "question": "Who is her grandfather?", "answer": "Bo Ek",
         "evidences": [["Ada", "father", "Bo"]]},
    ],
    "musique": [
        {"id": "2hop__1_2", "question": "Who married the performer?", "answer": "Ada Lund", "answer_aliases": ["A. Lund"],
         "answerable": True, "question_decomposition": [{"id": 1}, {"id": 2}]},
        {"id": "4hop1__1_2_3_4", "question": "In which state was she born?", "answer": "Ohio", "answer_aliases": [],
         "answerable": True, "question_decomposition": [{"id": 1}, {"id": 2}, {"id": 3}, {"id": 4}]},
    ],
    "bamboogle": [
        {"Question": "Who was king when the tower was built?", "Answer": "Charles II"},
        {"Question": "Who founded the firm that made the ship?", "Answer": "Bo Ek"},
    ],
}  # fmt: skip

HOPS = {
    "nq": ["1", "1"],
    "triviaqa": ["1", "1"],
    "popqa": ["1", "1"],
    "hotpotqa": ["2", "2+"],
    "2wikimultihopqa": ["4", "2"],
    "musique": ["2", "4"],
    "bamboogle": ["2", "2"],
}
GOLDS = {
    "nq": ["Ada Lund", "A. Lund"],
    "triviaqa": ["Thames", "River Thames", "thames", "river thames"],
    "popqa": ["writer", "author"],
    "hotpotqa": ["yes"],
    "2wikimultihopqa": ["Film X"],
    "musique": ["Ada Lund", "A. Lund"],
    "bamboogle": ["Charles II"],
}
IDS = {"triviaqa": "tc_1", "popqa": "42", "hotpotqa": "5a8b", "2wikimultihopqa": "88f1", "musique": "2hop__1_2"}


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_json_list(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def save_to_disk(path: Path, rows: list[dict[str, Any]]) -> None:
    datasets.DatasetDict({"dev": datasets.Dataset.from_list(rows)}).save_to_disk(str(path))


FORMS = {"rows.jsonl": write_json_lines, "rows.json": write_json_list, "rows.parquet": write_parquet}


def rows_of(name: str, tmp_path: Path, rows: list[dict[str, Any]] | None = None, options: str = "") -> list[Task]:
    """The tasks of some rows (default: the set's own), from JSON lines, in the order of the panel."""
    path = tmp_path / f"{name}.jsonl"
    write_json_lines(path, OWN[name] if rows is None else rows)
    return list(load_panel(f"sets:{name}:dev={path}{options}").tasks)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SETS)
def test_every_set_is_read_in_its_own_columns_from_every_form_of_file(name: str, form: str, tmp_path: Path) -> None:
    path = tmp_path / form
    FORMS[form](path, OWN[name])
    tasks = {task.text: task for task in load_panel(f"sets:{name}:dev={path}")}
    questions = [row.get("question") or row["Question"] for row in OWN[name]]
    assert set(tasks) == set(questions)
    assert [tasks[question].labels for question in questions] == [{"hops": hops} for hops in HOPS[name]]
    first = tasks[questions[0]]
    assert first.payload == {"answers": GOLDS[name]}
    assert (first.task_type, first.split) == (name, "dev")
    assert first.task_id.startswith(f"{name}/dev/") and first.task_id.endswith(IDS.get(name, ""))


def test_a_saved_directory_is_read_by_its_split(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "saved", OWN["nq"])
    saved = load_panel(f"sets:nq:dev={tmp_path / 'saved'}")
    assert [task.sha256 for task in saved] == [task.sha256 for task in rows_of("nq", tmp_path)]
    with pytest.raises(ArtifactError, match="does not have the split.*expected train, found dev"):
        load_panel(f"sets:nq:train={tmp_path / 'saved'}")


FLASHRAG_METADATA = {
    "hotpotqa": [{"type": "bridge"}, {"type": "comparison"}],
    "2wikimultihopqa": [{"type": "bridge_comparison"}, {"type": "compositional"}],
    "musique": [{"answerable": True, "question_decomposition": [{"id": n} for n in range(steps)]} for steps in (2, 3)],
}
FLASHRAG_HOPS = {"hotpotqa": ["2", "2"], "2wikimultihopqa": ["4", "2"], "musique": ["2", "3"], "bamboogle": ["2", "2"]}


@pytest.mark.parametrize("name", SETS)
def test_every_set_is_read_in_the_columns_of_flashrag(name: str, tmp_path: Path) -> None:
    metadata = FLASHRAG_METADATA.get(name, [{}, {}])
    rows = [
        {
            "id": f"dev_{n}",
            "question": f"question {n}?",
            "golden_answers": [f"gold {n}", "other"],
            "metadata": metadata[n],
        }
        for n in (0, 1)
    ]
    tasks = rows_of(name, tmp_path, rows)
    assert [task.task_id for task in tasks] == [f"{name}/dev/dev_0", f"{name}/dev/dev_1"]
    assert [task.payload["answers"] for task in tasks] == [["gold 0", "other"], ["gold 1", "other"]]
    assert [task.labels["hops"] for task in tasks] == FLASHRAG_HOPS.get(name, ["1", "1"])


def test_an_answer_that_looks_like_a_date_stays_the_text_it_is(tmp_path: Path) -> None:
    [task] = rows_of("nq", tmp_path, [{"question": "when", "answer": ["2009-05-01"]}])
    assert task.payload["answers"] == ["2009-05-01"]


def test_a_question_may_hold_line_separators_and_any_script(tmp_path: Path) -> None:
    rows = [{"question": "wer\u2028 schrieb\u0085 es", "answer": ["Åse\u2028Lund", "李"]}]
    [task] = rows_of("nq", tmp_path, rows)
    assert task.text == "wer schrieb es" and task.payload["answers"] == ["Åse Lund", "李"]


def test_columns_can_be_named_for_a_set_of_ones_own(tmp_path: Path) -> None:
    rows = [{"key": 1, "query": "who?", "gold": {"main": "Ada", "more": ["Lund"]}, "steps": 3}]
    [task] = rows_of("mine", tmp_path, rows, ",question=query,answers=gold.main+gold.more,id=key,hops=steps")
    assert task.task_id == "mine/dev/1" and task.task_type == "mine" and task.labels == {"hops": "3"}
    assert task.payload == {"answers": ["Ada", "Lund"]}
    [plain] = rows_of("mine", tmp_path, rows, ",question=query,answers=gold.main")
    assert plain.labels == {} and plain.task_id != task.task_id


def test_ids_without_own_ones_are_hashes_of_the_question(tmp_path: Path) -> None:
    first, second = rows_of("nq", tmp_path), rows_of("nq", tmp_path, list(reversed(OWN["nq"])))
    assert [task.task_id for task in first] == [task.task_id for task in second]
    assert len({task.task_id for task in first}) == 2


# --- repeated, unanswerable and bad rows


def test_a_repeated_row_is_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = OWN["hotpotqa"] + OWN["hotpotqa"][:1]
    assert len(rows_of("hotpotqa", tmp_path, rows)) == 2
    assert "hotpotqa:dev: 1 of 3 rows with the same question and answers again were left out" in caplog.text


def test_an_id_with_other_content_names_both_rows(tmp_path: Path) -> None:
    rows = [*OWN["popqa"], {**OWN["popqa"][0], "possible_answers": '["painter"]'}]
    with pytest.raises(ArtifactError, match=r"occurs twice.*line 3.*line 1, found 'popqa/dev/42'"):
        rows_of("popqa", tmp_path, rows)


def test_answers_of_equal_questions_without_ids_are_joined_in_any_order_of_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": "who", "answer": ["Bo"]}, {"question": "who", "answer": ["Ada", "Bo"]}]
    [task], [other] = rows_of("nq", tmp_path, rows), rows_of("nq", tmp_path, rows[::-1])
    assert task.payload == {"answers": ["Ada", "Bo"]} and task.sha256 == other.sha256
    assert "1 of 2 rows with a question that occurs with other answers were joined" in caplog.text


def test_unanswerable_questions_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unanswerable = {**OWN["musique"][0], "answerable": False, "answer": "nobody"}
    assert len(rows_of("musique", tmp_path, [unanswerable, *OWN["musique"]])) == 2
    assert "1 of 3 rows with no answer in their corpus" in caplog.text
    with pytest.raises(ArtifactError, match="holds no question"):
        rows_of("musique", tmp_path, [unanswerable])


BAD: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "no text": ("nq", {"question": " ", "answer": ["x"]}, "a question has no text"),
    "question null": ("nq", {"question": None, "answer": ["x"]}, "a question has no text"),
    "question a number": ("nq", {"question": 7, "answer": ["x"]}, "found 7"),
    "no answers": ("nq", {"question": "q", "answer": []}, "no gold answer"),
    "answers null": ("nq", {"question": "q", "answer": None}, "no gold answer"),
    "answers that vanish": ("nq", {"question": "q", "answer": ["The", " -- "]}, "no gold answer"),
    "an answer that is a number": ("nq", {"question": "q", "answer": ["x", 5]}, "is not a text.*found 5"),
    "an answer that is an object": ("nq", {"question": "q", "answer": {"text": "x"}}, "is not a text"),
    "half a character": ("nq", {"question": "q \ud800", "answer": ["x"]}, "half a character"),
    "answers withheld": (
        "triviaqa",
        {"question_id": "1", "question": "q", "answer": {"value": "<unk>", "aliases": [], "normalized_aliases": []}},
        "no gold answer",
    ),
    "answers no JSON": ("popqa", {"id": 1, "question": "q", "possible_answers": "['x']"}, "no JSON list"),
    "id null": ("popqa", {"id": None, "question": "q", "possible_answers": '["x"]'}, "no id"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_row_is_one_sentence_with_its_place_and_can_be_left_out(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, row, message = BAD[fault]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [OWN[name][0], row])))
    with pytest.raises(ArtifactError, match=message) as caught:
        load_panel(f"sets:{name}:dev={path}")
    sentence = str(caught.value)
    assert f"{path}, line 2, column" in sentence and "bad=skip" in sentence and "\n" not in sentence
    assert caught.value.exit_code == 3
    assert len(load_panel(f"sets:{name}:dev={path},bad=skip")) == 1
    assert "1 of 2 rows with no usable question or answer were left out" in caplog.text


FILES: Mapping[str, tuple[bytes, str]] = {
    "empty": (b"", "holds no question"),
    "blank": (b"\n \n", "holds no question"),
    "not JSON": (b'{"question": "q", "answer": ["x"]}\n\n{"question": ', "not JSON .*line 3"),
    "not objects": (b'"question"\n', "line 1.*expected a JSON object, found str"),
    "list cut": (b'[{"question": "q", "answer": ["x"]}', "not JSON"),
    "list of texts": (b'["q"]', "row 1.*expected a JSON object, found str"),
    "deeply nested": (b'{"question": ' + b"[" * 100_000, "not JSON"),
    "not text": (b'{"question": "q", "answer": ["x"]}\n{"question": "\xff\xfe', "is not text|not JSON"),
    "other columns": (b'{"q": "q", "a": {"text": "x"}}', "line 1.*expected question, answer, or id.*found q, a.text"),
}


@pytest.mark.parametrize("fault", FILES)
def test_a_file_that_cannot_be_read_is_one_sentence_with_the_file(fault: str, tmp_path: Path) -> None:
    content, message = FILES[fault]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=message) as caught:
        load_panel(f"sets:nq:dev={path}")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_a_damaged_parquet_file_and_a_missing_one_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 nothing else")
    with pytest.raises(ArtifactError, match=r"cannot read the question file \(.*rows\.parquet"):
        load_panel(f"sets:nq:dev={path}")
    with pytest.raises(ArtifactError, match=r"no such question file .*absent\.parquet"):
        load_panel(f"sets:nq:dev={tmp_path / 'absent.parquet'}")
    with pytest.raises(ArtifactError, match="holds no data set of save_to_disk"):
        load_panel(f"sets:nq:dev={tmp_path}")


def test_paths_may_hold_characters_of_patterns_and_of_sources(tmp_path: Path) -> None:
    path = tmp_path / "rows [1]+*, x.jsonl"
    write_json_lines(path, OWN["nq"])
    other = tmp_path / "b.jsonl"
    write_json_lines(other, OWN["bamboogle"])
    assert len(load_panel(f"sets:nq:dev={path}+bamboogle:test={other},count=1")) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("sets:", "NAME:SPLIT"),
        ("sets:nq", "NAME:SPLIT"),
        ("sets:nq:", "NAME:SPLIT"),
        ("sets:nq:dev=", "NAME:SPLIT"),
        ("sets:nq:dev+", "NAME:SPLIT"),
        ("sets:hotpot:dev", "unknown data set.*did you mean hotpotqa?"),
        ("sets:squad:dev=x.jsonl", "unknown data set"),
        ("sets:popqa:train", "popqa has no such split.*expected one of test"),
        ("sets:nq:dev+nq:dev", "given twice"),
        ("sets:nq:dev,cuont=3", "did you mean count?"),
        ("sets:nq:dev,count=0", "a panel needs a task"),
        ("sets:nq:dev,count=many", "count is not a number"),
        ("sets:nq:dev,hub=mine", "expected own or flashrag"),
        ("sets:nq:dev,bad=ignore", "expected error or skip"),
        ("sets:nq:dev=x.jsonl,question=q", "answers is missing"),
        ("sets:nq:dev,question=q,answers=a", "local files only"),
        ("sets:bamboogle:dev,hub=flashrag", "bamboogle has no such split"),
    ],
)
def test_a_source_that_cannot_be_is_refused_before_anything_is_loaded(
    source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("nothing may be loaded"))
    with pytest.raises(ConfigError, match=message) as caught:
        load_panel(source)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


# --- choosing questions


def many(number: int) -> list[Task]:
    return [Task(f"nq/dev/{index}", "nq", "dev", f"q {index}", {"answers": ["x"]}) for index in range(number)]


def test_the_chosen_questions_depend_on_neither_the_order_nor_many_other_rows() -> None:
    tasks = many(200)
    chosen = {task.task_id for task in subsample(tasks, 20, seed=3)}
    shuffled = list(tasks)
    random.Random(1).shuffle(shuffled)
    assert {task.task_id for task in subsample(shuffled, 20, seed=3)} == chosen
    fewer = [task for task in tasks if task.task_id in chosen or int(task.task_id[7:]) % 2]
    assert {task.task_id for task in subsample(fewer, 20, seed=3)} == chosen
    assert {task.task_id for task in subsample(tasks, 10, seed=3)} < chosen
    assert {task.task_id for task in subsample(tasks, 20, seed=4)} != chosen


def test_a_set_with_fewer_questions_than_asked_gives_all_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(rows_of("bamboogle", tmp_path, options=",count=500,seed=1")) == 2
    assert "it has 2 questions, fewer than count=500; all are taken" in caplog.text


def test_count_holds_for_each_set_and_the_limit_for_the_panel(tmp_path: Path) -> None:
    for name in ("nq", "bamboogle"):
        rows_of(name, tmp_path)
    source = f"sets:nq:dev={tmp_path}/nq.jsonl+bamboogle:test={tmp_path}/bamboogle.jsonl"
    assert sorted(task.task_type for task in load_panel(f"{source},count=1")) == ["bamboogle", "nq"]
    assert [task.task_type for task in load_panel(source, limit=2)] == ["bamboogle", "bamboogle"]
    assert {task.task_type for task in load_panel(source, limit=2, spread=True)} == {"bamboogle", "nq"}


# --- the hub


class FakeHub:
    """Takes the place of `datasets.load_dataset`: records the call, and answers with rows or an error."""

    def __init__(self, rows: list[dict[str, Any]] | Exception) -> None:
        self.rows, self.calls = rows, []

    def __call__(self, *arguments: Any, **settings: Any) -> list[dict[str, Any]]:
        self.calls.append((*arguments, settings))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows


@pytest.mark.parametrize(
    ("name", "split", "call"),
    [
        ("nq", "test", ("google-research-datasets/nq_open", "nq_open", {"split": "validation"})),
        ("triviaqa", "train", ("mandarjoshi/trivia_qa", "unfiltered.nocontext", {"split": "train"})),
        ("popqa", "test", ("akariasai/PopQA", None, {"split": "test"})),
        ("hotpotqa", "dev", ("hotpotqa/hotpot_qa", "distractor", {"split": "validation"})),
        ("2wikimultihopqa", "dev", ("framolfese/2WikiMultihopQA", None, {"split": "validation"})),
        ("musique", "dev", ("dgslibisey/MuSiQue", None, {"split": "validation"})),
        ("bamboogle", "test", ("chiayewken/bamboogle", None, {"split": "test"})),
    ],
)
def test_a_set_is_asked_of_its_own_repository_and_named_by_the_split_there(
    name: str, split: str, call: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(OWN[name])
    monkeypatch.setattr(datasets, "load_dataset", hub)
    panel = load_panel(f"sets:{name}:{split}")
    assert hub.calls == [call] and len(panel) == 2
    assert {task.split for task in panel} == {call[2]["split"]}


def test_the_flashrag_collection_is_asked_when_the_source_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub([{"id": "test_0", "question": "q?", "golden_answers": ["x"]}])
    monkeypatch.setattr(datasets, "load_dataset", hub)
    panel = load_panel("sets:nq:test+hotpotqa:dev,hub=flashrag")
    assert hub.calls == [(FLASHRAG_HUB, name, {"split": split})
                         for name, split in (("nq", "test"), ("hotpotqa", "dev"))]  # fmt: skip
    assert [task.task_id for task in panel] == ["hotpotqa/dev/test_0", "nq/test/test_0"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("Couldn't reach 'x' on the Hub"), "cannot be reached.*sets:nq:SPLIT=FILE"),
        (datasets.exceptions.DatasetNotFoundError("Dataset 'x' is a gated dataset on the Hub."), "wants a login"),
        (ValueError("BuilderConfig 'nq_open' not found. Available: ['a']"), "in the expected form.*Available"),
        (RuntimeError("Dataset scripts are no longer supported, but found x.py"), "in the expected form.*scripts"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence_that_says_what_to_do(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", FakeHub(error))
    with pytest.raises(RsipoError, match=message) as caught:
        load_panel("sets:nq:train")
    assert caught.value.exit_code == 3 and "google-research-datasets/nq_open" in str(caught.value)


def test_a_parsed_source_keeps_its_parts() -> None:
    parsed = parse_sets("sets:nq:train+hotpotqa:dev=/data/h.jsonl,count=5,seed=2,bad=skip")
    assert [str(entry) for entry in parsed.entries] == ["nq:train", "hotpotqa:dev"]
    assert [entry.path for entry in parsed.entries] == [None, Path("/data/h.jsonl")]
    assert (parsed.count, parsed.seed, parsed.hub, parsed.skip_bad) == (5, 2, "own", True)
