"""The command line: light to start, one sentence for every failure, documented exit codes, safe text."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rsipo_cli import doctor as doctor_module
from rsipo_cli import failures
from rsipo_cli.app import app
from rsipo_cli.console import BarReporter, LineReporter, json_text, make_reporter, print_result
from rsipo_cli.failures import guarded
from rsipo_cli.options import step_in_progress
from rsipo_cli.plan import make_plan, turn_bytes
from rsipo_cli.text import visible
from schemas import __version__
from schemas.artifacts import publish_directory
from schemas.config import Config
from schemas.config_loading import config_from_mapping, load_config
from schemas.errors import ArtifactError, ConfigError, EngineError, LockError, NumericsError, RsipoError
from schemas.run_directory import RunDirectory
from stages.stage import StageResult

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "vllm", "deepspeed", "transformers", "duckdb", "pyarrow", "pydantic", "numpy", "scipy", "textworld")
COMMANDS = [
    "loop",
    "sft-skills",
    "rollout",
    "replay",
    "estimate-gains",
    "train-step",
    "evaluate",
    "doctor",
    "tasks",
    "index",
]


@pytest.fixture(autouse=True)
def _clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Signal handlers and the log's place belong to the process; every test starts without them."""
    monkeypatch.setattr(failures, "_log_path", None)
    monkeypatch.delenv("RSIPO_TRACEBACK", raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "my.toml"
    path.write_text("[run]\nsteps = 3\n")
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", Config())


def _call(*arguments: object) -> int:
    return guarded(lambda: app([str(argument) for argument in arguments], prog_name="rsipo"))


def _stage(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]) -> None:
    monkeypatch.setattr(f"stages.{name}.run", function)


def _done(run: RunDirectory, step: int, **options: Any) -> StageResult:
    return StageResult("rollout", step, "done", {"success": 0.5})


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_imports_nothing_heavy(command: str | None) -> None:
    # typer itself converts the options of a command with pydantic; the overview needs none.
    heavy = HEAVY if command is None else [name for name in HEAVY if name != "pydantic"]
    arguments = ["--help"] if command is None else [command, "--help"]
    program = (
        "import sys\nfrom rsipo_cli.app import app\n"
        f"try:\n    app({arguments!r}, prog_name='rsipo')\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("Usage: rsipo")
    assert result.stderr.strip() == "[]"


def test_help_is_fast() -> None:
    def seconds() -> float:
        start = os.times()
        subprocess.run([sys.executable, "-m", "rsipo_cli", "--help"], cwd=ROOT, capture_output=True, check=True)
        end = os.times()
        return end.children_user + end.children_system - start.children_user - start.children_system

    # Processor time, so that a busy machine does not decide.
    assert min(seconds() for _ in range(3)) < 0.3


def test_every_command_has_a_help_text_and_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert _call("--help") == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command}" in text
    assert "--install-completion" in text
    assert _call("--version") == 0
    assert capsys.readouterr().out == f"rsipo {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["rollout"],
        ["rollout", "--run", "x", "--colour"],
        ["rollout", "--run", "x", "--step", "0"],
        ["rollout", "--run", "x", "--step", "many"],
        ["loop", "--steps", "0"],
        ["sft-skills", "--run", "x"],
        ["evaluate", "--run", "x", "--attempts", "0"],
        ["evaluate", "--run", "x", "--temperature", "-1"],
    ],
)
def test_wrong_usage_exits_with_2_and_no_traceback(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(*arguments) == 2
    output = capsys.readouterr()
    assert "Error:" in output.err and "Traceback" not in output.err and output.out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RsipoError("failed"), 1),
        (EngineError("failed"), 1),
        (NumericsError("failed"), 1),
        (ConfigError("failed"), 2),
        (ArtifactError("failed"), 3),
        (LockError("failed"), 4),
    ],
)
def test_every_error_class_has_its_exit_code_and_one_line(
    error: RsipoError, code: int, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    _stage(monkeypatch, "rollout", fail)
    assert _call("rollout", "--run", run.root, "--quiet") == code
    assert capsys.readouterr().err == "rsipo: failed\n"


def test_an_unexpected_error_leaves_its_traceback_in_the_run_s_log(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise KeyError("model said \x1b[31mred\x1b[0m\n")

    _stage(monkeypatch, "rollout", fail)
    assert _call("rollout", "--run", run.root, "--quiet") == 1
    shown = capsys.readouterr().err
    assert shown.startswith("rsipo: unexpected error") and shown.count("\n") == 1
    assert str(run.log_path) in shown and "\x1b" not in shown and "Traceback" not in shown
    assert "Traceback" in run.log_path.read_text() and "KeyError" in run.log_path.read_text()


def test_a_traceback_is_shown_on_request_and_kept_elsewhere_when_the_log_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RSIPO_TRACEBACK", "1")
    (tmp_path / "file").write_text("")
    failures.log_to(tmp_path / "file" / "rsipo.log")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))

    def fail() -> None:
        raise ZeroDivisionError("oh")

    assert guarded(fail) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "ZeroDivisionError" in (tmp_path / f"rsipo-{os.getpid()}.log").read_text()


SLEEPER = """
import sys, time
from pathlib import Path
import stages.rollout
from schemas.artifacts import publish_directory

def run(run, step, **options):
    def write(folder):
        (folder / "half").write_text("half")
        print("ready", flush=True)
        time.sleep(60)
    publish_directory(run.checkpoint_dir(1), kind="t", inputs={}, write=write)

stages.rollout.run = run
sys.argv = ["rsipo", "rollout", "--run", sys.argv[1], "--quiet"]
from rsipo_cli.app import main
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_cleanly(run: RunDirectory, number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(run.root)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert list(run.root.rglob(".tmp-*"))
    process.send_signal(number)
    error = process.communicate(timeout=30)[1]
    assert process.returncode == code
    assert error.startswith(f"rsipo: stopped by {number.name}") and error.count("\n") == 1
    assert not list(run.root.rglob(".tmp-*"))
    assert (run.root / ".lock").read_text() == ""
    with run.lock():
        pass


def test_a_second_command_on_a_run_exits_with_4_and_names_the_holder(run: RunDirectory) -> None:
    with run.lock():
        command = [sys.executable, "-m", "rsipo_cli", "rollout", "--run", str(run.root), "--quiet"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 4
    assert f"process {os.getpid()} on" in result.stderr and result.stderr.count("\n") == 1


def test_a_missing_run_directory_exits_with_3_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _call("replay", "--run", tmp_path / "none") == 3
    assert "does not exist" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_options_start_a_run_and_another_configuration_is_refused_later(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _stage(monkeypatch, "rollout", _done)
    start = ("rollout", "--run", tmp_path / "run", "--config", config_file, "--set", "run.seed=7", "--quiet")
    assert _call(*start) == 0
    stored = RunDirectory.open(tmp_path / "run").config
    assert (stored.run.steps, stored.run.seed) == (3, 7)
    assert _call(*start) == 0
    assert _call("rollout", "--run", tmp_path / "run", "--quiet") == 0
    assert _call("rollout", "--run", tmp_path / "run", "--set", "run.seed=7", "--quiet") == 0
    (tmp_path / "run" / "rollouts").mkdir()  # the stage has made something
    capsys.readouterr()
    assert _call("rollout", "--run", tmp_path / "run", "--set", "run.seed=8", "--quiet") == 2
    assert "run.seed (7, 8)" in capsys.readouterr().err
    assert _call("rollout", "--run", tmp_path / "run", "--config", config_file, "--quiet") == 2
    assert RunDirectory.open(tmp_path / "run").config == stored


def test_a_stage_gets_the_step_in_progress_or_the_one_that_was_named(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, bool]] = []

    def stage(directory: RunDirectory, step: int, *, force: bool, reporter: object) -> StageResult:
        assert directory == run
        seen.append((step, force))
        return StageResult("rollout", step, "up_to_date", {})

    _stage(monkeypatch, "rollout", stage)
    assert _call("rollout", "--run", run.root) == 0
    assert "rollout, step 1: up to date" in capsys.readouterr().out
    assert _call("rollout", "--run", run.root, "--step", 4, "--force") == 0
    assert seen == [(1, False), (4, True)]


def test_the_step_in_progress_follows_the_last_step_trained_to_its_end(run: RunDirectory) -> None:
    def publish(folder: Path) -> None:
        publish_directory(folder, kind="t", inputs={}, write=lambda inner: None)

    assert step_in_progress(run) == 1
    for step in (0, 1, 2):
        publish(run.checkpoint_dir(step))
    publish(run.step_dir("train_metrics", 1))
    assert step_in_progress(run) == 2  # step 2 saved its checkpoint and was killed before its metrics
    publish(run.step_dir("train_metrics", 2))
    assert step_in_progress(run) == 3


def test_loop_without_a_directory_uses_one_named_after_its_configuration(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def loop(directory: RunDirectory, *, steps: int | None, force: bool, reporter: object) -> StageResult:
        seen.update(root=directory.root, steps=steps)
        return StageResult("loop", 3, "done", {})

    _stage(monkeypatch, "loop", loop)
    monkeypatch.chdir(tmp_path)
    assert _call("loop", "--config", config_file, "--steps", 3) == 0
    assert seen == {"root": tmp_path / "runs" / "my", "steps": 3}


def test_evaluate_wants_something_to_evaluate_and_somewhere_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _call("evaluate") == 2
    assert "--run DIR or --model PATH" in capsys.readouterr().err
    assert _call("evaluate", "--model", "bundled:x") == 2
    assert "--out DIR" in capsys.readouterr().err


def test_evaluate_with_out_leaves_the_run_to_its_writer(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def evaluate(directory: RunDirectory | None, step: int | None, **options: Any) -> StageResult:
        seen.update(options, directory=directory, step=step, locked=(run.root / ".lock").read_text() != "")
        return StageResult("evaluate", 0, "done", {"env_errors": 0, "episodes": 9})

    _stage(monkeypatch, "evaluate", evaluate)
    arguments = ("--panel", "p", "--attempts", 2, "--seed", 5, "--temperature", 0, "--batch", 3)
    assert _call("evaluate", "--run", run.root, "--out", tmp_path / "out", *arguments, "--quiet") == 0
    assert not seen["locked"] and seen["directory"] == run and seen["config"] == run.config
    assert (seen["panel"], seen["attempts"], seen["seed"], seen["temperature"], seen["batch"]) == ("p", 2, 5, 0.0, 3)
    assert _call("evaluate", "--run", run.root, "--step", 0, "--quiet") == 0
    assert seen["locked"] and seen["step"] == 0 and seen["out"] is None


def test_a_dry_run_prints_a_configuration_that_loads_again_and_writes_nothing(
    tmp_path: Path, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    command = ("loop", "--run", tmp_path / "run", "--config", config_file, "--set", "run.seed=7", "--dry-run")
    assert _call(*command) == 0
    (tmp_path / "again.toml").write_text(capsys.readouterr().out)
    assert load_config(None, tmp_path / "again.toml") == load_config(None, config_file, ["run.seed=7"])
    (tmp_path / "again.toml").unlink()
    assert _call(*command, "--json") == 0
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["config"]["run"]["seed"] == 7 and parsed["plan"]["tasks_per_step"] == 16
    assert sorted(tmp_path.rglob("*")) == before


def test_the_plan_of_an_evaluation_shows_its_own_options(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "--panel",
        "generated:size=small,count=7",
        "--attempts",
        3,
        "--seed",
        5,
        "--temperature",
        0,
        "--batch",
        2,
    )
    command = ("evaluate", "--run", run.root, "--dry-run", "--json", *arguments)
    assert _call(*command) == 2
    assert "--out DIR" in capsys.readouterr().err
    assert _call(*command, "--model", "bundled:x", "--out", tmp_path / "out") == 0
    parsed = json.loads(capsys.readouterr().out)
    shown = ("evaluated", "panel", "tasks", "attempts", "seed", "temperature", "episodes", "batch_episodes")
    assert [parsed["plan"][key] for key in shown] == ["bundled:x", arguments[1], 7, 3, 5, 0.0, 21, 2]
    assert parsed["plan"]["run_directory"] == str(tmp_path / "out")
    assert parsed["config"]["tasks"]["evaluate"] == arguments[1] and parsed["config"]["evaluate"]["attempts"] == 3
    assert _call("evaluate", "--run", run.root, "--step", 4, "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"]["evaluated"] == f"checkpoint 4 of {run.root}"
    assert not (tmp_path / "out").exists()


def test_an_evaluation_with_too_many_errors_is_printed_and_exits_with_1(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {"env_errors": 3, "episodes": 9, "failed": [{"task_id": "a", "error": "broke"}]}
    _stage(monkeypatch, "evaluate", lambda *_, **__: StageResult("evaluate", 0, "done", summary))
    for place in ((), ("--out", tmp_path / "out")):
        assert _call("evaluate", "--run", run.root, *place, "--quiet") == 1
        output = capsys.readouterr()
        assert "env_errors" in output.out and "found 3 of 9, the first: 'broke'" in output.err


def test_estimates_elsewhere_refuse_settings_that_they_would_drop(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("estimate-gains", "--run", run.root, "--out", tmp_path / "out", "--dry-run")
    assert _call(*command, "--set", "gains.decay=0.5") == 0
    capsys.readouterr()
    assert _call(*command, "--set", "gains.decay=0.5", "--set", "rollout.group_size=4") == 2
    assert "rollout.group_size (8, 4)" in capsys.readouterr().err


def test_the_plan_counts_episodes_parts_evaluations_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    data = {
        "run": {"steps": 25, "keep_last": 2, "keep_every": 10},
        "tasks": {"per_step": 10},
        "rollout": {"group_size": 4, "groups_per_part": 4},
        "replay": {"replays": 3},
        "env": {"max_turns": 7},
        "evaluate": {"every": 10},
        "model": {"path": str(tmp_path)},
    }
    config = config_from_mapping(data)
    plan = make_plan(config)
    assert plan["student_episodes_per_step"] == 40
    assert plan["most_replays_per_step"] == 30
    assert plan["parts_per_step"] == 3
    assert plan["most_turns_per_step"] == 490
    assert plan["evaluations"] == 4  # before the first, after 10 and 20, and after the last
    assert plan["checkpoint_bytes"] == 3000
    assert plan["most_bytes_of_the_run"] == 490 * turn_bytes(config) * 25 + 3000 * 5


def test_a_panel_smaller_than_a_step_is_refused_before_anything_runs(
    tmp_path: Path, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = "tasks.train=generated:size=small,count=8"
    command = ("loop", "--run", tmp_path / "run", "--config", config_file, "--set", setting, "--dry-run")
    assert _call(*command) == 2
    assert "expected at least 16 tasks, found 8" in capsys.readouterr().err


def test_results_are_tables_or_json_and_text_of_models_is_harmless() -> None:
    evil = "a\x1b]0;title\x07[bold red]b[/bold red]\n\x1b[2Jc"
    summary = {
        "success": 0.25,
        "missing": None,
        "by_type": {"heat": 0.5, evil: evil},
        "evaluations": [{"step": 0, "note": evil}, {"step": 1, "success": float("nan")}],
        "next_command": "rsipo replay --run " + "x" * 300,
    }
    result = StageResult("rollout", 3, "done", summary)
    stream = io.StringIO()
    print_result(result, as_json=False, stream=stream)
    text = stream.getvalue()
    assert "\x1b" not in text and "\x07" not in text
    assert "a[bold red]b[/bold red] c" in text
    assert "rollout, step 3: done" in text and "by_type heat" in text
    assert text.endswith("next: rsipo replay --run " + "x" * 300 + "\n")
    stream = io.StringIO()
    print_result(result, as_json=True, stream=stream)
    parsed = json.loads(stream.getvalue())
    assert parsed["summary"]["evaluations"][1]["success"] is None
    assert parsed["summary"]["evaluations"][0]["note"] == evil


def test_json_holds_no_nan_and_no_unknown_object() -> None:
    assert json.loads(json_text({"a": float("inf"), "b": Path("x"), "c": (1.5, [float("nan")])})) == {
        "a": None,
        "b": "x",
        "c": [1.5, [None]],
    }


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain é 漢", "plain é 漢"),
        ("a\x1b[31;1mb\x1b[0m", "ab"),
        ("a\x1b]8;;http://x\x1b\\b", "ab"),
        ("\x9b31mred", "red"),
        ("a\r\nb\tc", "a  b c"),
        ("a\u202eb\ud800\x00\x7f", "ab"),
    ],
)
def test_text_is_shown_without_control_characters(raw: str, shown: str) -> None:
    assert visible(raw) == shown


def test_progress_without_a_terminal_is_plain_lines_with_time_left() -> None:
    now = [0.0]
    stream = io.StringIO()
    reporter = LineReporter(stream, clock=lambda: now[0])
    reporter.stage("rollout", 100, "episodes")
    reporter.advance(20)  # found on disk: must not count as speed
    for _ in range(4):
        now[0] += 5.0
        reporter.advance(10, success=0.5, note="\x1b[31mx")
    reporter.note("a\x1b[31m[b]")
    reporter.done()
    assert stream.getvalue().splitlines() == [
        "rollout 40/100 episodes, success 0.5, note x, 30 s left",
        "rollout 60/100 episodes, success 0.5, note x, 20 s left",
        "a[b]",
        "rollout 60/100 episodes, success 0.5, note x, 20 s",
    ]


def test_the_reporter_fits_the_stream(capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    reporter = make_reporter(quiet=False, stream=stream)
    assert isinstance(reporter, BarReporter)
    reporter.stage("rollout", 4, "episodes")
    reporter.advance(2, success=0.5, text="[bold]x[/bold]")
    reporter.note("note [red]")
    reporter.done()
    assert "rollout" in stream.getvalue() and "[bold]x[/bold]" in stream.getvalue() and "[red]" in stream.getvalue()
    assert isinstance(make_reporter(quiet=False, stream=io.StringIO()), LineReporter)
    silent = make_reporter(quiet=True, stream=stream)
    silent.note("nothing")
    assert "nothing" not in stream.getvalue()


def test_doctor_plays_its_golden_game_and_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> str:
        raise ImportError("no such\x1b[31m piece")

    golden = dict(doctor_module._CHECKS)["golden game"]
    monkeypatch.setattr(doctor_module, "_CHECKS", (("golden game", golden),))
    assert _call("doctor") == 0
    assert "won in" in capsys.readouterr().out
    monkeypatch.setattr(doctor_module, "_CHECKS", (("golden game", golden), ("piece", broken)))
    assert _call("doctor") == 1
    output = capsys.readouterr()
    assert "MISSING  piece: ImportError: no such piece" in output.out
    assert output.err == "rsipo: not ready, see: piece\n"
    assert _call("doctor", "--json") == 1
    assert json.loads(capsys.readouterr().out)["piece"]["ok"] is False


def test_doctor_names_a_package_of_the_wrong_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = doctor_module.importlib.metadata.version
    monkeypatch.setattr(doctor_module, "_CHECKS", ())
    monkeypatch.setattr(
        doctor_module.importlib.metadata, "version", lambda name: "0.1" if name == "alfworld" else versions(name)
    )
    assert _call("doctor") == 1
    assert "MISSING  alfworld: 0.1, expected ==0.4.2" in capsys.readouterr().out


def test_output_into_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m rsipo_cli --help | head -c 1 > /dev/null"
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr
