"""The stages on the small world: what they record, and that crashes, batch sizes and repetition change nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.progress import SilentReporter
from data.seeds import derive_seed
from schemas.artifacts import MANIFEST, read_manifest, sha256_file
from schemas.config import Config
from schemas.config_loading import config_from_mapping
from schemas.errors import ArtifactError, ConfigError, EngineError, EnvironmentFault, LockError, RsipoError
from schemas.run_directory import RunDirectory
from schemas.table_io import clear_step, read_table
from stages import estimate_gains, evaluate, loop, part_publishing, replay, rollout
from stages.checkpoints import publish_initial_checkpoint
from stages.engines import GenerationRequest, GenerationResult
from stages.evidence import is_control
from stages.workbench import Workbench
from tests.small_world import MODULUS, SkilledEngine, small_config, write_small_policy


class Notes(SilentReporter):
    """Remembers what would stay on screen."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def digests(run: RunDirectory) -> dict[str, str]:
    """sha256 of every published file but the timings'."""
    files = [
        path for path in run.root.rglob("*") if path.suffix in (".parquet", ".safetensors") or path.name == MANIFEST
    ]
    names = {path: path.relative_to(run.root).as_posix() for path in files}
    return {name: sha256_file(path) for path, name in names.items() if not name.startswith("timings")}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def finished(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Two iterations, undisturbed; not to be changed."""
    run = RunDirectory.create(tmp_path_factory.mktemp("runs") / "finished", small_config(policy))
    result = loop.run(run)
    assert result.state == "done"
    return run


def started(policy: Path, root: Path, **changes: object) -> RunDirectory:
    return RunDirectory.create(root / "run", small_config(policy, **changes))


def rows(run: RunDirectory, table: str, step: int = 1) -> list[dict]:
    return read_table(run, table, step).to_pylist()


# -- what is recorded --------------------------------------------------------------------------------------------------


def test_every_task_of_the_step_has_its_group_of_episodes_played_by_checkpoint_zero(finished: RunDirectory) -> None:
    episodes = rows(finished, "rollouts")
    with Workbench(finished) as bench:
        tasks = [task.task_id for task in bench.tasks_of_step(1)]
        weights = bench.weights_sha256(0)
    group = finished.config.rollout.group_size
    assert [(row["task_id"], row["index"]) for row in episodes] == [(task, g) for task in tasks for g in range(group)]
    assert {row["weights_sha256"] for row in episodes} == {weights}
    assert len({row["episode_id"] for row in episodes}) == len(episodes)
    assert all(row["skill_id"] is None for row in episodes)
    assert {row["seed"] for row in episodes} == {
        derive_seed(0, "rollout", 1, task, g) for task in tasks for g in range(group)
    }
    assert {path.name for path in finished.step_dir("rollouts", 1).glob("*.parquet")} == {
        "part-00000.parquet",
        "part-00001.parquet",
    }


def test_turns_join_their_episodes_and_hold_one_logprob_for_each_sampled_token(finished: RunDirectory) -> None:
    for episode_table, turn_table in (("rollouts", "rollout_turns"), ("replays", "replay_turns")):
        episodes = {row["episode_id"]: row for row in rows(finished, episode_table)}
        turns = rows(finished, turn_table)
        counts = Counter(row["episode_id"] for row in turns)
        assert {name: row["turns"] for name, row in episodes.items()} == {name: counts[name] for name in episodes}
        assert set(counts) <= set(episodes)
        assert all(len(row["token_ids"]) == len(row["behaviour_logprobs"]) > 0 for row in turns)
        assert all(logprob <= 0 for row in turns for logprob in row["behaviour_logprobs"])


def test_outcomes_are_those_of_the_world(finished: RunDirectory) -> None:
    last = {}
    for row in rows(finished, "rollout_turns"):
        last[row["episode_id"]] = row["action"]
    for row in rows(finished, "rollouts"):
        number = int(row["task_id"].removeprefix("task-"))
        action = last[row["episode_id"]]
        assert row["won"] == (action is not None and int(action[1:]) % MODULUS == number % MODULUS)


def test_skills_come_from_the_evidence_half_and_their_replays_name_them(finished: RunDirectory) -> None:
    group = finished.config.rollout.group_size
    skills = rows(finished, "skills")
    index = {row["episode_id"]: row["index"] for row in rows(finished, "rollouts")}
    assert {(row["skill"] is None) == (row["reason"] is not None) for row in skills} == {True}
    assert any(row["skill"] for row in skills) and any(row["reason"] for row in skills)
    for row in skills:
        assert not is_control(index[row["source_episode_id"]], group)
        assert len(row["token_ids"]) == len(row["behaviour_logprobs"])
    replays = rows(finished, "replays")
    usable = {row["task_id"]: row["skill_id"] for row in skills if row["skill"]}
    assert {row["task_id"]: row["skill_id"] for row in replays} == usable
    assert Counter(row["task_id"] for row in replays) == dict.fromkeys(usable, finished.config.replay.replays)
    starts = {row["task_id"]: row["fingerprint"] for row in rows(finished, "rollouts")}
    assert all(row["fingerprint"] == starts[row["task_id"]] for row in replays)


def test_the_teachers_prompt_holds_the_skill_and_the_students_does_not(finished: RunDirectory, policy: Path) -> None:
    with Workbench(finished) as bench:
        decode = bench.renderer(0).decode
    student = decode([token for row in rows(finished, "rollout_turns") for token in row["prompt_token_ids"]])
    assert "skill:" not in student
    for row in rows(finished, "replay_turns"):
        assert ("skill: n1 n2 n3 n4 n5 n6" in decode(row["prompt_token_ids"])) == (row["turn"] == 0)


def test_type_statistics_are_carried_from_step_to_step(finished: RunDirectory) -> None:
    first, second = (estimate_gains.read_statistics(finished, step) for step in (1, 2))
    assert second.all_types.steps == first.all_types.steps + 1 == 2
    assert len(rows(finished, "gains")) == finished.config.tasks.per_step


def test_each_step_is_played_by_the_weights_that_the_step_before_made(finished: RunDirectory) -> None:
    with Workbench(finished) as bench:
        sha = [bench.weights_sha256(step) for step in range(3)]
    assert len(set(sha)) == 3
    for table in ("rollouts", "replays", "skills"):
        for step in (1, 2):
            assert {row["weights_sha256"] for row in rows(finished, table, step)} == {sha[step - 1]}
    for step in range(3):
        assert {row["weights_sha256"] for row in rows(finished, "evals", step)} == {sha[step]}


def test_window_prompts_are_played_and_recorded_whole(policy: Path, tmp_path: Path) -> None:
    run = started(policy, tmp_path, prompt__mode="window", prompt__history=1, replay__max_skill_tokens=16)
    rollout.run(run, 1)
    replay.run(run, 1)
    opening = [row["prompt_token_ids"][0] for row in rows(run, "rollout_turns")]
    assert len(set(opening)) == 1 and {row["turn"] for row in rows(run, "rollout_turns")} >= {0, 1}


# -- repetition, staleness, crashes ------------------------------------------------------------------------------------


def test_a_finished_run_is_up_to_date_and_nothing_is_written_again(finished: RunDirectory) -> None:
    before, notes = digests(finished), Notes()
    result = loop.run(finished, reporter=notes)
    assert result.state == "up_to_date" and digests(finished) == before
    assert notes.lines[0].startswith("resumed from step 2 (sha ")
    for stage in (rollout, replay, estimate_gains):
        assert stage.run(finished, 1).state == "up_to_date"
    assert [row["step"] for row in result.summary["evaluations"]] == [0, 1, 2]


def with_config(run: RunDirectory, section: str, **changes: object) -> RunDirectory:
    """The run as if its configuration had been edited by hand."""
    values = run.config.model_dump()
    values[section] |= changes
    return replace(run, config=config_from_mapping(values))


def test_changed_inputs_are_stale_named_and_rebuilt_only_on_request(policy: Path, tmp_path: Path) -> None:
    run = started(policy, tmp_path)
    rollout.run(run, 1)
    before = digests(run)
    edited = with_config(run, "rollout", temperature=0.7)
    with pytest.raises(ArtifactError, match=r"stale.*changed inputs: config.*--force"):
        rollout.run(edited, 1)
    assert digests(run) == before
    assert rollout.run(with_config(run, "env", max_error_share=0.5), 1).state == "up_to_date"
    assert rollout.run(edited, 1, force=True).state == "done"
    assert {row["temperature"] for row in rows(run, "rollout_turns")} == {np.float32(0.7)}


def killed_at(call: int, work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do `work` in a child process that dies, as by SIGKILL, when it is about to publish part number `call`."""
    child = os.fork()
    if child == 0:
        try:
            calls = iter(range(call))
            publish = part_publishing.write_part

            def dying(*arguments: object) -> None:
                if next(calls, None) is None:
                    os._exit(9)
                publish(*arguments)  # type: ignore[arg-type]

            monkeypatch.setattr(part_publishing, "write_part", dying)
            work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_stage_killed_between_parts_resumes_to_the_same_bytes(
    policy: Path, finished: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(policy, tmp_path)

    def both() -> None:
        rollout.run(run, 1)
        replay.run(run, 1)

    killed_at(0, both, monkeypatch)
    killed_at(1, both, monkeypatch)
    assert (run.step_dir("rollouts", 1) / "part-00000.parquet").exists()
    assert not (run.step_dir("rollouts", 1) / MANIFEST).exists()
    first = sha256_file(run.step_dir("rollouts", 1) / "part-00000.parquet")
    killed_at(2, both, monkeypatch)  # the rollouts end, the second part of the replays does not
    assert sha256_file(run.step_dir("rollouts", 1) / "part-00000.parquet") == first
    both()
    expected = digests(finished)
    for name, digest in digests(run).items():
        if name.split("/")[0] in ("rollouts", "rollout_turns", "skills", "replays", "replay_turns"):
            assert digest == expected[name], name


def test_the_loop_makes_the_same_bytes_whether_stages_run_alone_or_together(
    policy: Path, finished: RunDirectory, tmp_path: Path
) -> None:
    from stages import train_step

    run = started(policy, tmp_path)
    for step in (1, 2):
        for stage in (rollout, replay, estimate_gains, train_step):
            assert stage.run(run, step).state == "done"
    loop.run(run)  # only the evaluations are owed
    assert digests(run) == digests(finished)


def test_a_damaged_table_is_rebuilt_by_the_loop_to_the_same_bytes(
    policy: Path, finished: RunDirectory, tmp_path: Path
) -> None:
    run = started(policy, tmp_path)
    loop.run(run)
    path = run.step_dir("rollout_turns", 2) / "part-00001.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ArtifactError, match=r"rollout_turns.*part-00001.*rsipo rollout"):
        read_table(run, "rollout_turns", 2)
    assert loop.run(run).state == "done"
    assert digests(run) == digests(finished)


def test_a_damaged_checkpoint_plays_nothing_and_is_made_again_to_the_same_bytes(
    policy: Path, finished: RunDirectory, tmp_path: Path
) -> None:
    from stages import train_step

    run = started(policy, tmp_path)
    loop.run(run)
    before = digests(run)
    path = run.checkpoint_dir(1) / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(bytes(content))
    for stage, step in ((train_step, 2), (evaluate, 1), (rollout, 2)):
        clear_step(run, stage.TABLES, step)
        with pytest.raises(ArtifactError, match="model.safetensors.*rsipo train-step .*--step 1 --force"):
            stage.run(run, step, force=True)
    assert train_step.run(run, 1).state == "up_to_date"
    assert train_step.run(run, 1, force=True).state == "done"
    assert loop.run(run).state == "done"
    assert digests(run) == before == digests(finished)


def test_a_missing_or_damaged_table_is_named_with_the_command_that_makes_it(policy: Path, tmp_path: Path) -> None:
    from stages import train_step

    run = started(policy, tmp_path)
    for stage in (replay, train_step):
        with pytest.raises(ArtifactError, match=r"missing.*rollouts.*run `rsipo rollout .*--step 1 --force`"):
            stage.run(run, 1)
    rollout.run(run, 1)
    with pytest.raises(ArtifactError, match=r"missing.*replays.*run `rsipo replay "):
        estimate_gains.run(run, 1)
    path = run.step_dir("rollouts", 1) / "part-00000.parquet"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ArtifactError, match=r"damaged.*part-00000.*run `rsipo rollout "):
        replay.run(run, 1)


def test_a_longer_loop_goes_on_where_a_shorter_one_ended(policy: Path, finished: RunDirectory, tmp_path: Path) -> None:
    run, notes = started(policy, tmp_path), Notes()
    loop.run(run, 1)
    assert loop.trained_steps(run) == 1
    loop.run(run, 2, reporter=notes)
    assert any(line.startswith("resumed from step 1 (sha ") for line in notes.lines)
    assert digests(run) == digests(finished)


def test_removed_checkpoints_do_not_make_a_finished_run_stale(policy: Path, tmp_path: Path) -> None:
    run = started(policy, tmp_path, run__keep_last=1, run__steps=3, evaluate__every=0)
    loop.run(run)
    assert run.finished_steps("checkpoints") == [0, 3]
    assert loop.run(run).state == "up_to_date"
    with pytest.raises(ArtifactError, match="removed"), Workbench(run) as bench:
        bench.model_dir(1)


def test_other_code_keeps_trained_steps_and_says_so_and_force_rebuilds_them(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages import train_step

    run = started(policy, tmp_path, run__steps=1, evaluate__every=0)
    loop.run(run)
    before, played = digests(run), rows(run, "rollout_turns")
    for module in (rollout, replay, estimate_gains, train_step, evaluate):
        monkeypatch.setattr(module, "code_version", lambda: "another version")
    notes = Notes()
    assert loop.run(run, reporter=notes).state == "up_to_date"
    assert digests(run) == before
    assert any("steps 1 were made by another version" in line for line in notes.lines)
    assert loop.run(run, force=True).state == "done"
    assert digests(run) != before and rows(run, "rollout_turns") == played


def test_steps_made_again_keep_the_checkpoint_that_the_next_step_begins_with(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages import train_step

    run = started(policy, tmp_path, run__keep_last=1, run__steps=3, evaluate__every=0)
    loop.run(run)
    for module in (rollout, replay, estimate_gains, train_step):
        monkeypatch.setattr(module, "code_version", lambda: "another version")
    loop.run(run, force=True)
    for step in (1, 2, 3):
        manifest = read_manifest(run.step_dir("train_metrics", step))
        assert manifest.inputs["code"] == "another version", step
        if step > 1:
            before = read_manifest(run.step_dir("train_metrics", step - 1))
            assert manifest.inputs["checkpoint"] == before.extra["checkpoint_sha256"]
    assert run.finished_steps("checkpoints") == [0, 3]


def test_a_step_whose_weights_are_gone_is_not_cleared_before_it_can_be_made_again(policy: Path, tmp_path: Path) -> None:
    from stages import train_step

    run = started(policy, tmp_path, run__keep_last=1, run__steps=2, evaluate__every=0)
    loop.run(run)
    assert run.finished_steps("checkpoints") == [0, 2]
    edited, before = with_config(with_config(run, "optimizer", lr=0.5), "rollout", temperature=0.5), digests(run)
    for stage in (rollout, replay, train_step):
        with pytest.raises(ArtifactError, match="removed"):
            stage.run(edited, 2, force=True)
    assert digests(run) == before


def test_a_lost_checkpoint_zero_is_imported_again_only_if_it_is_the_one_the_run_began_with(
    policy: Path, tmp_path: Path
) -> None:
    run = started(policy, tmp_path, run__steps=1, evaluate__every=0)
    loop.run(run)
    before = digests(run)
    shutil.rmtree(run.checkpoint_dir(0))
    other = write_small_policy(tmp_path / "other", seed=5)
    with pytest.raises(ArtifactError, match=r"began with other weights.*checkpoints/step=00000.*sft-skills"):
        loop.run(with_config(run, "model", path=str(other)))
    assert digests(run) == {name: value for name, value in before.items() if "step=00000" not in name}
    assert loop.run(run).state == "up_to_date" and digests(run) == before


def test_another_initial_policy_makes_a_step_with_a_kl_term_stale(policy: Path, tmp_path: Path) -> None:
    from stages import train_step

    for coefficient, reads_it in ((0.01, True), (0.0, False)):
        run = started(
            policy, tmp_path / str(coefficient), run__steps=2, evaluate__every=0, objective__kl_coef=coefficient
        )
        loop.run(run)
        other = started(write_small_policy(tmp_path / f"other {coefficient}", seed=5), tmp_path / f"from {coefficient}")
        publish_initial_checkpoint(other)
        shutil.rmtree(run.checkpoint_dir(0))
        shutil.copytree(other.checkpoint_dir(0), run.checkpoint_dir(0))
        if reads_it:
            with pytest.raises(ArtifactError, match=r"stale.*changed inputs: reference"):
                train_step.run(run, 2)
        else:
            assert train_step.run(run, 2).state == "up_to_date"


def test_an_input_that_older_code_did_not_name_makes_no_trained_step_again(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages import train_step

    run, inputs = started(policy, tmp_path, run__steps=1, evaluate__every=0), train_step.stage_inputs
    with monkeypatch.context() as older:
        older.setattr(train_step, "code_version", lambda: "older")
        older.setattr(
            train_step,
            "stage_inputs",
            lambda *given: {name: value for name, value in inputs(*given).items() if name != "reference"},
        )
        loop.run(run)
    before = digests(run)
    assert loop.run(run).state == "up_to_date" and digests(run) == before
    monkeypatch.setattr(train_step, "stage_inputs", lambda *given: inputs(*given) | {"reference": "another"})
    assert loop.run(run, force=True).state == "done" and digests(run) != before
    monkeypatch.setattr(train_step, "stage_inputs", lambda *given: inputs(*given) | {"reference": "one more"})
    assert loop.run(run).state == "done"  # the same code names it: that is a change


def test_without_distillation_and_skill_loss_nothing_is_replayed(policy: Path, tmp_path: Path) -> None:
    run = started(
        policy, tmp_path, objective__opsd_coef=0.0, objective__skill_coef=0.0, run__steps=1, evaluate__every=0
    )
    assert loop.run(run).state == "done"
    assert not (run.root / "replays").exists() and not (run.root / "gains").exists()
    assert run.finished_steps("checkpoints") == [0, 1]


def test_token_credit_that_reads_the_teacher_wants_replays_though_no_other_loss_does(policy: Path) -> None:
    changes = {"objective__opsd_coef": 0.0, "objective__skill_coef": 0.0}
    assert not loop.needs_replays(small_config(policy, **changes))
    assert loop.needs_replays(small_config(policy, objective__advantage="rlsd", **changes))


def test_a_loop_of_no_steps_is_an_error(finished: RunDirectory) -> None:
    with pytest.raises(ConfigError, match="--steps"):
        loop.run(finished, 0)


# -- environments that misbehave ---------------------------------------------------------------------------------------


def test_replays_from_another_start_are_excluded_reported_and_leave_trust_at_one(policy: Path, tmp_path: Path) -> None:
    run = started(policy, tmp_path, env__options={"drift": True})
    rollout.run(run, 1)
    summary = replay.run(run, 1).summary
    episodes = rows(run, "replays")
    assert summary["fingerprint_mismatches"] == len(episodes) > 0
    assert all(row["won"] is None and row["error"].startswith("fingerprint") for row in episodes)
    estimate_gains.run(run, 1)
    reasons = Counter(row["reason"] for row in rows(run, "gains"))
    assert reasons["fingerprint"] == summary["skills"] and None not in reasons
    assert {row["trust"] for row in rows(run, "gains")} == {1.0}


def test_too_many_environment_errors_fail_the_stage_and_the_step_is_owed(policy: Path, tmp_path: Path) -> None:
    run = started(policy, tmp_path, env__options={"errors": list(range(12))}, env__max_error_share=0.2)
    with pytest.raises(EnvironmentFault, match=r"of 16, the first: .*the world broke"):
        rollout.run(run, 1)
    assert not (run.step_dir("rollouts", 1) / MANIFEST).exists()


def test_few_environment_errors_are_rows_that_do_not_count(policy: Path, tmp_path: Path) -> None:
    run = started(
        policy, tmp_path, env__options={"errors": [int(first_task(policy, tmp_path))]}, env__max_error_share=0.5
    )
    summary = rollout.run(run, 1).summary
    broken = [row for row in rows(run, "rollouts") if row["won"] is None]
    assert summary["env_errors"] == len(broken) > 0
    assert {row["stop_reason"] for row in broken} == {"env_error"} and all(row["error"] for row in broken)


def first_task(policy: Path, tmp_path: Path) -> str:
    run = RunDirectory.create(tmp_path / "look", small_config(policy))
    with Workbench(run) as bench:
        return bench.tasks_of_step(1)[0].task_id.removeprefix("task-")


def test_too_few_skills_fail_the_stage_with_counts(policy: Path, tmp_path: Path) -> None:
    run = started(policy, tmp_path, replay__max_no_skill_share=0.0)
    rollout.run(run, 1)
    with pytest.raises(RsipoError, match=r"no usable skill.*of 4 \(\d no_json\)"):
        replay.run(run, 1)
    assert not (run.step_dir("replays", 1) / MANIFEST).exists()


def test_a_skill_with_a_log_probability_that_is_not_finite_is_a_reason_and_no_failure(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, written, broken = started(policy, tmp_path), SkilledEngine._written, []
    rollout.run(run, 1)

    def breaking(engine: SkilledEngine, request: GenerationRequest) -> GenerationResult:
        result = written(engine, request)
        if broken or request.seed % engine.silent_share == 0:
            return result
        broken.append(request.seed)
        return replace(result, logprobs=[*result.logprobs[:-1], float("nan")])

    monkeypatch.setattr(SkilledEngine, "_written", breaking)
    summary = replay.run(run, 1).summary
    assert len(broken) == summary["no_skill"]["non_finite"] == 1 and summary["skills"] > 0
    (row,) = [row for row in rows(run, "skills") if row["reason"] == "non_finite"]
    assert row["seed"] == broken[0] and row["skill"] is None and row["token_ids"] == row["behaviour_logprobs"] == []
    assert row["task_id"] not in {episode["task_id"] for episode in rows(run, "replays")}
    assert estimate_gains.run(run, 1).summary["without_gain"]["non_finite"] == 1


def test_another_version_of_the_environment_makes_what_was_played_stale_by_name(policy: Path, tmp_path: Path) -> None:
    run = started(policy, tmp_path, env__options={"version": "1"}, evaluate__attempts=1)
    for stage, step in ((rollout, 1), (replay, 1), (evaluate, 0)):
        stage.run(run, step)

    class Later(Workbench):
        @property
        def environment_version(self) -> str:
            return "small 2"

    with Later(run) as bench:
        for stage, step in ((rollout, 1), (replay, 1), (evaluate, 0)):
            with pytest.raises(ArtifactError, match=r"stale.*environment \(was small 1, is small 2\)"):
                stage.run(run, step, bench=bench)


def test_an_environment_of_another_version_is_noted(policy: Path, tmp_path: Path) -> None:
    run = started(policy, tmp_path)
    with Workbench(run) as bench:
        bench.panel_sha256("train")
    notes = Notes()
    rollout.run(with_config(run, "env", options={"version": "2"}), 1, reporter=notes)
    assert any("began with environment small 1; now playing small 2" in line for line in notes.lines)


# -- evaluation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 64])
def test_evaluation_does_not_depend_on_the_batch(finished: RunDirectory, batch: int, tmp_path: Path) -> None:
    evaluate.run(finished, 2, out=tmp_path / "out", batch=batch)
    other = RunDirectory.open(tmp_path / "out")
    for table in ("evals", "eval_turns"):
        ours, theirs = (read_table(run, table, 2).to_pylist() for run in (finished, other))
        for left, right in zip(ours, theirs, strict=True):
            assert np.allclose(left.pop("behaviour_logprobs", 0), right.pop("behaviour_logprobs", 0), atol=1e-5)
            assert left == right


def test_an_evaluation_of_another_panel_needs_a_place_of_its_own(finished: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--out"):
        evaluate.run(finished, 0, panel="30-33")
    before = digests(finished)
    result = evaluate.run(finished, 1, panel="30-33", attempts=3, out=tmp_path / "out")
    assert (result.summary["tasks"], result.summary["attempts"], result.summary["episodes"]) == (3, 3, 9)
    assert digests(finished) == before
    assert evaluate.run(finished, 1, panel="30-33", attempts=3, out=tmp_path / "out").state == "up_to_date"


def test_a_plain_model_is_evaluated_without_a_run_and_equals_checkpoint_zero(
    finished: RunDirectory, policy: Path, tmp_path: Path
) -> None:
    config: Config = finished.config
    result = evaluate.run(None, out=tmp_path / "out", model=str(policy), config=config)
    own = evaluate.run(finished, 0)
    same = ("success", "wilson_low", "won", "episodes", "mean_turns", "stop_reasons")
    assert {name: result.summary[name] for name in same} == {name: own.summary[name] for name in same}
    with pytest.raises(ConfigError, match="nowhere to write"):
        evaluate.run(None, model=str(policy))


def test_an_evaluation_in_a_broken_environment_is_reported_and_made_again_by_force(
    policy: Path, tmp_path: Path
) -> None:
    run = started(policy, tmp_path, env__options={"errors": [20, 21, 22, 23, 24]}, evaluate__attempts=1)
    result = evaluate.run(run, 0)
    errors = result.summary["env_errors"]
    assert errors >= 2 and result.summary["episodes"] == 9
    with pytest.raises(
        EnvironmentFault, match=f"at most 20%, found {errors} of 9, the first: .*the world broke.*--force"
    ):
        evaluate.check_errors(result, run.config)
    again = evaluate.run(run, 0)
    assert again.state == "up_to_date" and again.summary == result.summary
    assert evaluate.run(run, 0, force=True).state == "done"
    lenient = with_config(run, "env", max_error_share=0.9)
    evaluate.check_errors(result, lenient.config)
    assert evaluate.run(lenient, 0, force=True).state == "up_to_date"


def test_an_evaluation_elsewhere_makes_no_checkpoint_zero_in_a_run_that_another_process_writes(
    policy: Path, tmp_path: Path
) -> None:
    run = started(policy, tmp_path)
    holder = (
        "import sys\nfrom schemas.run_directory import RunDirectory\n"
        "with RunDirectory.open(sys.argv[1]).lock():\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", holder, str(run.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(LockError, match=f"process {process.pid}"):
            evaluate.run(run, 0, out=tmp_path / "out")
        assert not run.checkpoint_dir(0).exists()
    assert evaluate.run(run, 0, out=tmp_path / "out").state == "done"


def test_evaluation_seeds_ignore_the_step(finished: RunDirectory) -> None:
    seeds = [[row["seed"] for row in rows(finished, "evals", step)] for step in (0, 1)]
    assert seeds[0] == seeds[1]


# -- weights and priors ------------------------------------------------------------------------------------------------


def test_an_engine_that_keeps_its_old_weights_is_found_out(
    finished: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Workbench(finished) as bench:
        engine = bench.engine(0)

        def forgetful(model_dir: Path, weights_sha256: str) -> None:
            engine.weights_sha256 = weights_sha256

        monkeypatch.setattr(engine, "load_weights", forgetful)
        with pytest.raises(EngineError, match="does not serve the weights"):
            bench.engine(2)


def test_gains_are_not_estimated_past_a_replayed_step_without_them(
    policy: Path, finished: RunDirectory, tmp_path: Path
) -> None:
    run = started(policy, tmp_path)
    loop.run(run)
    for step in (1, 2):
        clear_step(run, estimate_gains.TABLES, step)
    with pytest.raises(ArtifactError, match="has replays and no gains.*run `rsipo estimate-gains .*--step 1 --force`"):
        estimate_gains.run(run, 2)
    assert run.finished_steps("type_stats") == []
    for step in (1, 2):
        assert estimate_gains.run(run, step).state == "done"
    assert digests(run) == digests(finished)


def test_an_audit_with_other_priors_leaves_the_run_alone(finished: RunDirectory, tmp_path: Path) -> None:
    before = digests(finished)
    same = estimate_gains.audit(finished, None, finished.config.gains, tmp_path / "same")
    other = estimate_gains.audit(
        finished, None, finished.config.gains.model_copy(update={"trust_slope": 0.0}), tmp_path / "other"
    )
    assert digests(finished) == before
    for step in (1, 2):
        assert rows(same, "gains", step) == rows(finished, "gains", step)
        assert rows(same, "type_stats", step) == rows(finished, "type_stats", step)
        assert {row["trust"] for row in rows(other, "gains", step)} == {1.0}


def test_damage_in_a_trained_step_whose_weights_are_gone_is_told_and_stops_no_training(
    policy: Path, tmp_path: Path
) -> None:
    run, notes = started(policy, tmp_path, run__keep_last=1, run__steps=2, evaluate__attempts=1), Notes()
    loop.run(run)
    assert run.finished_steps("checkpoints") == [0, 2]
    (run.step_dir("evals", 1) / MANIFEST).unlink()
    path = run.step_dir("replays", 2) / "part-00000.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    assert loop.run(run, 3, reporter=notes).state == "done"
    assert run.finished_steps("checkpoints") == [0, 3]
    for fault in ("step 2 replay cannot be made again", "step 1 evaluate cannot be made again"):
        assert any(line.startswith(f"{fault} without checkpoint 1") for line in notes.lines)


def test_the_loop_names_the_inputs_for_which_it_makes_a_stage_again(policy: Path, tmp_path: Path) -> None:
    run, notes = started(policy, tmp_path, run__steps=1, evaluate__every=0), Notes()
    loop.run(run)
    edited = with_config(run, "gains", trust_slope=1.0)
    assert loop.run(edited, reporter=notes).state == "done"
    assert "step 1 estimate-gains: config changed, made again" in notes.lines
    assert "step 1 train-step: gains changed, made again" in notes.lines
    assert not any("rollout: " in line and "changed" in line for line in notes.lines)
