"""One of several training processes, started by `stages.launch` through torchrun: load, update, save, leave.

Usage: `python -m torch.distributed.run ... -m stages.train_worker JOB_DIRECTORY`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from schemas.config import Config
from schemas.errors import RsipoError


def work(job: Path) -> None:
    """Carry out the request in `job`; the process of rank 0 writes the outcome."""
    from stages.batch_file import load_batch
    from stages.launch import write_result
    from stages.learner import Learner

    request = json.loads((job / "request.json").read_text())
    places = {
        name: None if request[name] is None else Path(request[name])
        for name in ("model_dir", "optimizer_dir", "reference_dir")
    }
    model_dir = places["model_dir"]
    if model_dir is None:
        raise ValueError("a request without a model")
    config = Config.model_validate(request["config"])
    learner = Learner(model_dir, places["optimizer_dir"], config, places["reference_dir"])
    result = learner.update(load_batch(job / "batch.safetensors"))
    weights_sha256 = learner.save(job / "model", job / "optimizer")
    if learner.rank == 0:
        write_result(job, result, weights_sha256)


def main() -> int:
    """Run the job named on the command line; an error we know is written down for the caller."""
    from stages.launch import write_error

    job = Path(sys.argv[1])
    try:
        work(job)
    except RsipoError as error:
        write_error(job, int(os.environ.get("RANK", "0")), error)
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        _leave()
    return 0


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written and the group is gone. Threads of the communication library may still run, and C++ now and then aborts
    # a process that ends with one of them; leaving without its destructors keeps finished work from being called dead.
    os._exit(status)
