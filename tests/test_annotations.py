"""Annotation files, the examples made from them, and the presets and the example file that ship with the package."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.annotations import Annotation, ChatRequest, Rejection, TrajectoryRequest, read_annotations
from data.household.environment import HouseholdEnvironment
from data.search.replies import parse_reply as parse_search_reply
from schemas.config import SftSection
from schemas.config_loading import load_config, preset_names
from schemas.errors import ArtifactError, ConfigError
from stages.rendering import Renderer
from stages.skill_examples import Example, audit_examples, check_audit, examples_of, split_examples, train_row
from tests.tiny_model import tiny_tokenizer

SKILL = "first find the object, then take it, then move it"
OWN = {
    "task_id": "t1",
    "task_type": "heat",
    "task": "heat the mug",
    "success": True,
    "trajectory": [
        {"observation": "a room", "reply": "<think>go</think><action>go to fridge 1</action>"},
        {"observation": "the fridge", "reply": "no tags"},
        {"observation": "the end"},
    ],
    "summary": "it went well",
    "skill": SKILL,
}


def action_of(reply: str) -> str | None:
    return HouseholdEnvironment().parse_reply(reply, cut=False).action


def search_action_of(reply: str) -> str | None:
    return parse_search_reply(reply, cut=False).action


def read(tmp_path: Path, *lines: object) -> tuple[list[Annotation], list[Rejection]]:
    path = tmp_path / "annotations.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return read_annotations(path, action_of)


def test_our_own_form_becomes_a_finished_episode(tmp_path: Path) -> None:
    (annotation,), rejected = read(tmp_path, OWN)
    request = annotation.request
    assert not rejected and isinstance(request, TrajectoryRequest)
    assert [turn.action for turn in request.turns] == ["go to fridge 1", None]
    assert (request.final.text, request.won, request.task.text, annotation.group) == (
        "the end",
        True,
        "heat the mug",
        "t1",
    )
    assert json.loads(annotation.response) == {"summary": "it went well", "skill": SKILL}


def test_type_may_stand_for_task_type_and_the_task_may_be_read_from_the_room(tmp_path: Path) -> None:
    line = {name: value for name, value in OWN.items() if name not in ("task", "task_type")} | {"type": "heat"}
    line["trajectory"] = [{"observation": "a room\n\nYour task is to: cool the mug.", "reply": "x"}]
    (annotation,), _ = read(tmp_path, line)
    assert isinstance(annotation.request, TrajectoryRequest) and annotation.request.task.text == "cool the mug."


def test_prompt_and_messages_forms_are_chats(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    (first, second), _ = read(tmp_path, {"prompt": "P", "response": "R"}, "", {"messages": messages})
    assert (first.request, first.response, first.line) == (ChatRequest(None, ("P",)), "R", 1)
    assert (second.request, second.response, second.line) == (ChatRequest("S", ("U",)), "A", 3)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object but list"),
        ({"text": "x"}, "none of the forms"),
        ({"prompt": "x"}, "`response` is missing"),
        ({"prompt": "x", "response": 3}, "`response` is not text"),
        ({"prompt": "None", "response": "y"}, "`prompt` is not text"),
        ({"messages": "x"}, "not a list of objects"),
        ({"messages": [{"role": "user", "content": "x"}]}, "assistant last"),
        ({"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]}, "assistant last"),
        (OWN | {"success": "yes"}, "`success` is not true or false"),
        (OWN | {"trajectory": []}, "no turn"),
        (OWN | {"trajectory": [{"observation": "only the end"}]}, "no turn"),
        (OWN | {"trajectory": [{"reply": "x"}]}, "`observation` is missing"),
        (OWN | {"skill": None}, "`skill` is not text"),
        ({name: value for name, value in OWN.items() if name != "task_id"}, "`task_id` is missing"),
        ({name: value for name, value in OWN.items() if name != "task"}, "does not name it"),
    ],
)
def test_a_line_that_holds_no_annotation_is_rejected_with_its_number_and_reason(
    tmp_path: Path, line: object, reason: str
) -> None:
    accepted, (rejection,) = read(tmp_path, OWN, line, OWN)
    assert [annotation.line for annotation in accepted] == [1, 3]
    assert rejection.line == 2 and reason in rejection.reason


@given(st.text())
def test_any_line_is_accepted_or_rejected_and_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "file"
    path.write_text(json.dumps(OWN) + "\n" + text.replace("\n", " ").replace("\r", " "))
    accepted, rejected = read_annotations(path, action_of)
    assert len(accepted) + len(rejected) in (1, 2)


def test_a_missing_an_empty_and_a_binary_file_are_one_sentence_each(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot read the annotations"):
        read_annotations(tmp_path / "absent", action_of)
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(ArtifactError, match="empty"):
        read_annotations(tmp_path / "empty", action_of)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtifactError, match="not UTF-8"):
        read_annotations(tmp_path / "binary", action_of)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(tiny_tokenizer(), HouseholdEnvironment().prompts, "window", 5, False)


def examples_from(tmp_path: Path, renderer: Renderer, *lines: object) -> tuple[list[Example], list[Rejection]]:
    accepted, _ = read(tmp_path, *lines)
    return examples_of(accepted, renderer, min_words=5, max_length=4000)


def test_loss_is_on_the_answer_and_its_end_and_nothing_else(tmp_path: Path, renderer: Renderer) -> None:
    (example,), _ = examples_from(tmp_path, renderer, OWN)
    row = train_row(example)
    assert row.targets.tolist() == list(example.answer_ids) and row.targets[-1] == renderer.eos_ids[0]
    assert renderer.decode(row.targets.tolist()) == json.dumps({"summary": "it went well", "skill": SKILL})
    assert "heat the mug" in renderer.decode(row.token_ids[~row.sampled].tolist())


def test_answers_that_the_policy_could_not_give_and_long_examples_are_rejected(
    tmp_path: Path, renderer: Renderer
) -> None:
    lines = [OWN, OWN | {"skill": "too short"}, {"prompt": "x", "response": "no skill here"}]
    examples, rejected = examples_from(tmp_path, renderer, *lines)
    assert [example.line for example in examples] == [1]
    assert [(r.line, "too_short" in r.reason, "no_json" in r.reason) for r in rejected] == [
        (2, True, False),
        (3, False, True),
    ]
    accepted, _ = read(tmp_path, OWN)
    _, (long,) = examples_of(accepted, renderer, min_words=5, max_length=20)
    assert "tokens are more than 20" in long.reason


def test_control_tokens_in_an_answer_are_not_control_tokens(tmp_path: Path, renderer: Renderer) -> None:
    end = renderer.eos_ids[0]
    text = renderer.tokenizer.convert_ids_to_tokens(end)
    (example,), _ = examples_from(tmp_path, renderer, OWN | {"skill": f"{SKILL} {text} now"})
    assert list(example.answer_ids).count(end) == 1


def made(line: int, group: str, *, skill: str = SKILL, answer: int = 0, won: bool | None = True) -> Example:
    return Example(line, group, (1, 2, line), (answer, 9), skill, won)


def test_the_audit_sees_duplicates_few_skills_and_success() -> None:
    same = [Example(line, "t", (1, 2), (3,), SKILL, line % 2 == 0) for line in range(4)]
    audit = audit_examples(same)
    assert (audit.unique_skills, audit.duplicate_share, audit.success_share) == (1, 0.75, 0.5)
    with pytest.raises(ConfigError, match="min_unique_skills"):
        check_audit(audit, SftSection())
    varied = audit_examples([*same, Example(9, "u", (1, 2), (3,), "another skill text", None)])
    with pytest.raises(ConfigError, match="max_duplicate_share"):
        check_audit(varied, SftSection())
    check_audit(varied, SftSection(max_duplicate_share=0.9))
    assert audit_examples([]).unique_skills == 0


@given(st.lists(st.integers(0, 9), min_size=2, max_size=40), st.integers(0, 3), st.randoms())
def test_held_out_tasks_are_whole_deterministic_and_independent_of_order(
    groups: list[int], seed: int, random: object
) -> None:
    examples = [made(line, f"task{group}") for line, group in enumerate(groups)]
    if len(set(groups)) == 1:
        with pytest.raises(ConfigError, match="no example is left"):
            split_examples(examples, 0.1, seed)
        return
    try:
        training, held_out = split_examples(examples, 0.1, seed)
    except ConfigError:
        pytest.fail("two tasks are enough")
    assert {e.line for e in training} | {e.line for e in held_out} == {e.line for e in examples}
    assert not {e.group for e in training} & {e.group for e in held_out}
    assert len(held_out) >= 0.1 * len(examples)
    shuffled = list(examples)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert {e.line for e in split_examples(shuffled, 0.1, seed)[1]} == {e.line for e in held_out}


@pytest.mark.parametrize(
    ("name", "parse"), [("annotations.jsonl", action_of), ("search-annotations.jsonl", search_action_of)]
)
def test_the_example_files_of_the_package_are_accepted_whole(name: str, parse, renderer: Renderer) -> None:
    path = Path(str(resources.files("data") / "examples" / name))
    accepted, rejected = read_annotations(path, parse)
    examples, unusable = examples_of(accepted, renderer, min_words=5, max_length=8192)
    assert not rejected and not unusable and len(examples) >= 20
    check_audit(audit_examples(examples), SftSection())
    assert {annotation.won for annotation in accepted} == {True, False}


def test_the_presets_load_and_grpo_differs_from_the_demonstration_in_two_coefficients() -> None:
    assert {"household-tiny", "household", "grpo"} <= set(preset_names())
    tiny, grpo, paper = (load_config(name) for name in ("household-tiny", "grpo", "household"))
    assert grpo.objective.opsd_coef == grpo.objective.skill_coef == 0.0
    same = {"opsd_coef": tiny.objective.opsd_coef, "skill_coef": tiny.objective.skill_coef}
    assert grpo.model_copy(update={"objective": grpo.objective.model_copy(update=same)}) == tiny
    assert (paper.run.steps, paper.rollout.group_size, paper.tasks.per_step) == (150, 8, 16)
    assert (paper.optimizer.lr, paper.objective.opsd_coef, paper.evaluate.temperature) == (1e-6, 0.01, 0.4)
