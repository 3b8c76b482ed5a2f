"""Training in several processes: a job directory, torchrun, and the error of a child as our own error.

The caller's process never joins the group. It writes the batch into a job directory, starts `stages.train_worker` once per
process, waits, and reads what the workers left. When one worker fails, torchrun ends the others within a second; the first
worker's own error is raised here, with the end of the log.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import schemas.errors as errors
from schemas.config import Config
from schemas.errors import LearnerError, RsipoError
from stages.batch_file import save_batch
from stages.learner import Logprobs, TrainingBatch, UpdateResult
from stages.threads import threads_of

_TAIL_LINES = 12
_STOP_SECONDS = 10.0


def train_in_processes(
    job: Path,
    batch: TrainingBatch,
    config: Config,
    *,
    model_dir: Path,
    optimizer_dir: Path | None,
    reference_dir: Path | None,
    log_path: Path,
) -> UpdateResult:
    """One update by `learner.processes` processes; `job/model`, `job/optimizer` and `job/result.json` hold its outcome.

    Raises the worker's error, or LearnerError with the end of the workers' log when a worker died without one.
    """
    shutil.rmtree(job, ignore_errors=True)
    job.mkdir(parents=True)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    threads = threads_of(config.run.threads, config.learner.processes)
    config = config.model_copy(update={"run": config.run.model_copy(update={"threads": threads})})
    save_batch(job / "batch.safetensors", batch)
    request = {
        "config": config.model_dump(mode="json"),
        "model_dir": str(model_dir),
        "optimizer_dir": None if optimizer_dir is None else str(optimizer_dir),
        "reference_dir": None if reference_dir is None else str(reference_dir),
    }
    (job / "request.json").write_text(json.dumps(request))
    _run(job, config.learner.processes, threads, log_path)
    return _read_result(job, len(batch.rows))


def _run(job: Path, processes: int, threads: int, log_path: Path) -> None:
    # PYTHONSAFEPATH keeps a module in the working directory from shadowing ours, so our own place must be named.
    places = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    }
    environment |= {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        "OMP_NUM_THREADS": str(threads),
        "TORCHELASTIC_ERROR_FILE": str(job / "torchelastic.json"),
    }
    with log_path.open("ab") as log:
        start = log.tell()
        child = subprocess.Popen(
            _command(job, processes), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            code = child.wait()
        except BaseException:
            _stop(child)
            raise
    if code != 0:
        raise _failure(job, code, log_path, start)


def _command(job: Path, processes: int) -> list[str]:
    """torchrun with a free port of its own on this machine."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(processes), "--monitor-interval", "0.2", "-m", "stages.train_worker", str(job)),
    ]


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Ask torchrun to end its workers; it does so on SIGTERM."""
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _failure(job: Path, code: int, log_path: Path, start: int) -> RsipoError:
    """The first error a worker wrote down; else what the log ends with."""
    for path in sorted(job.glob("error-*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name)):
        found = json.loads(path.read_text())
        kind = getattr(errors, found.pop("class"), LearnerError)
        return kind(found.pop("what"), **found)
    with log_path.open("rb") as log:
        log.seek(start)
        lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return LearnerError(
        "a training process died",
        where=str(log_path),
        found=f"exit code {code}: {' | '.join(lines[-_TAIL_LINES:])}",
        remedy="see the log, and try learner.processes=1 or fewer learner.micro_batch_tokens",
    )


def _read_result(job: Path, rows: int) -> UpdateResult:
    from safetensors.numpy import load_file

    metrics: dict[str, float] = json.loads((job / "result.json").read_text())["metrics"]
    arrays = load_file(job / "result.safetensors")
    trainer: list[Logprobs] = [arrays[f"trainer.{row}"] for row in range(rows)]
    return UpdateResult(metrics, trainer, [arrays.get(f"teacher.{row}") for row in range(rows)])


def write_result(job: Path, result: UpdateResult, weights_sha256: str) -> None:
    """What `train_in_processes` reads; `result.json` last."""
    from safetensors.numpy import save_file

    arrays: dict[str, np.ndarray] = {f"trainer.{row}": values for row, values in enumerate(result.trainer_logprobs)}
    arrays |= {f"teacher.{row}": values for row, values in enumerate(result.teacher_logprobs) if values is not None}
    save_file(arrays, job / "result.safetensors")
    content = {"metrics": result.metrics, "weights_sha256": weights_sha256}
    (job / "result.json").write_text(json.dumps(content))


def write_error(job: Path, rank: int, error: RsipoError) -> None:
    """A worker's error, for the caller to raise again."""
    content: dict[str, Any] = {"class": type(error).__name__, "what": error.what}
    for name in ("where", "expected", "found", "remedy"):
        value = getattr(error, name)
        content[name] = value if value is None else str(value)
    (job / f"error-{rank}.json").write_text(json.dumps(content))
