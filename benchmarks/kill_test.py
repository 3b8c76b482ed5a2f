"""Kill test: a demo of a few steps, killed with SIGKILL at random moments and resumed, must equal the undisturbed run.

Every trial starts `rsipo loop` in a fresh directory, kills it (and its children) at a random moment, runs the same command
again to its end, and compares the sha256 of every Parquet file (except wall-clock timings), manifest, panel and checkpoint
file with those of one undisturbed run.

    python -m benchmarks.kill_test --trials 30
    python -m benchmarks.kill_test --trials 5 --kills 3 --preset search-tiny --set tasks.per_step=2

Exit code 0 if every trial passed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from schemas.config_loading import load_config

# Small enough for thirty trials, large enough for several parts a stage and a kill inside each of them.
SMALL = (
    "tasks.per_step=4",
    "rollout.group_size=4",
    "rollout.groups_per_part=2",
    "replay.replays=2",
    "evaluate.every=2",
    "evaluate.batch_episodes=6",
)
SMALL_PANELS = {
    "household": (
        "tasks.train=generated:size=small,split=train,seed=1,count=12",
        "tasks.evaluate=generated:size=small,split=valid_seen,seed=2,count=12",
    ),
    "search": (
        "tasks.train=generated:articles=3000,seed=1,split=train,count=12",
        "tasks.evaluate=generated:articles=3000,seed=1,split=test,count=12",
    ),
}
COMPARED = ("*.parquet", "manifest.json", "*.safetensors", "*.jsonl.xz", "state.json", "config.json", "config.toml")


@dataclass
class Trial:
    """One killed and resumed run."""

    kills: list[float] = field(default_factory=list)  # seconds after the start of each killed process
    found: list[str] = field(default_factory=list)  # what the killed process left behind, in short
    different: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Equal files, and at least one kill that hit a running process."""
        return bool(self.kills) and not self.different and self.error is None


def digests(root: Path) -> dict[str, str]:
    """sha256 of every compared file by its path in the run."""
    files = {path for pattern in COMPARED for path in root.rglob(pattern) if path.is_file()}
    names = {path.relative_to(root).as_posix(): path for path in files}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in sorted(names.items())
        if not name.startswith("timings/")
    }


def loop_command(root: Path, options: argparse.Namespace) -> list[str]:
    """The command under test."""
    command = [sys.executable, "-m", "rsipo_cli", "loop", "--run", str(root), "--steps", str(options.steps), "--quiet"]
    command += ["--preset", options.preset]
    small = () if options.full else (*SMALL, *SMALL_PANELS.get(load_config(options.preset).env.name, ()))
    for setting in (*small, f"run.steps={options.steps}", *options.settings):
        command += ["--set", setting]
    return command


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start in a process group of its own, so that a kill also hits children."""
    with log.open("ab") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, start_new_session=True)


def run_to_end(command: Sequence[str], log: Path) -> tuple[int, float]:
    """Exit code and seconds."""
    began = time.monotonic()
    code = start(command, log).wait()
    return code, time.monotonic() - began


def kill_after(command: Sequence[str], log: Path, seconds: float) -> bool:
    """Start, wait, SIGKILL; False when the process had ended by itself."""
    process = start(command, log)
    try:
        process.wait(timeout=seconds)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


def state_of(root: Path) -> str:
    """What a killed process left: finished checkpoints, the table it was at."""
    manifests = Counter(path.parent.parent.name for path in root.rglob("manifest.json"))
    temporary = sum(1 for _ in root.rglob(".tmp-*"))
    return f"{manifests['checkpoints']} checkpoints, {sum(manifests.values())} manifests, {temporary} temporaries"


def try_once(number: int, place: Path, expected: dict[str, str], seconds: float, options: argparse.Namespace) -> Trial:
    """One trial: kill `--kills` times, resume, compare."""
    trial, root, log = Trial(), place / f"trial-{number:03d}", place / f"trial-{number:03d}.log"
    generator = random.Random(f"{options.seed} {number}")
    command = loop_command(root, options)
    for _ in range(options.kills):
        moment = generator.uniform(0.02, 1.0) * seconds
        if kill_after(command, log, moment):
            trial.kills.append(round(moment, 2))
            trial.found.append(state_of(root))
    if not trial.kills:  # slower luck than usual: kill it early, where it surely still runs
        shutil.rmtree(root, ignore_errors=True)
        if kill_after(command, log, moment := 0.3 * seconds):
            trial.kills.append(round(moment, 2))
            trial.found.append(state_of(root))
    code, _ = run_to_end(command, log)
    if code != 0:
        trial.error = f"the resumed loop ended with exit code {code}; see {log}"
        return trial
    found = digests(root)
    trial.different = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    leftovers = [path.relative_to(root).as_posix() for path in root.rglob(".tmp-*")]
    trial.different += [f"{name} (left over)" for name in leftovers]
    if trial.passed and not options.keep:
        shutil.rmtree(root)
    return trial


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--kills", type=int, default=1, help="kills per trial before the resume that is compared")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--preset", default="household-tiny")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--full", action="store_true", help="the preset as it is, not its small version")
    parser.add_argument("--dir", type=Path, default=None, help="where the runs go; default: a temporary directory")
    parser.add_argument("--keep", action="store_true", help="keep the runs of passed trials too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test and print one line per trial."""
    options = parse_arguments(arguments)
    place = Path(options.dir or tempfile.mkdtemp(prefix="rsipo-kill-test-")).resolve()
    place.mkdir(parents=True, exist_ok=True)
    reference = place / "undisturbed"
    code, seconds = run_to_end(loop_command(reference, options), place / "undisturbed.log")
    if code != 0:
        print(f"the undisturbed run failed with exit code {code}; see {place / 'undisturbed.log'}")
        return 1
    expected = digests(reference)
    print(f"undisturbed: {options.steps} steps, {seconds:.1f} s, {len(expected)} files; runs in {place}", flush=True)
    passed = 0
    for number in range(1, options.trials + 1):
        trial = try_once(number, place, expected, seconds, options)
        passed += trial.passed
        verdict = "pass" if trial.passed else "FAIL"
        moments = ", ".join(f"{moment:.2f} s ({left})" for moment, left in zip(trial.kills, trial.found, strict=True))
        print(f"trial {number:3d}: {verdict}  killed at {moments or 'no moment'}", flush=True)
        for line in [trial.error] if trial.error else trial.different[:10]:
            print(f"           {line}", flush=True)
    print(f"{passed} of {options.trials} trials equal the undisturbed run, byte for byte")
    return 0 if passed == options.trials else 1


if __name__ == "__main__":
    sys.exit(main())
