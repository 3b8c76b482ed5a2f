"""DeepSpeed's ZeRO-3 engine as this project uses it: started quietly, fed exactly, its state read and written in full.

Owns every contact with DeepSpeed: the process group, the configuration, gradient accumulation with a boundary that the
caller sets (`managed_gradient_accumulation` off), and the way from partitioned to whole tensors and back. Losses arrive
divided by global denominators; `backward` multiplies by the number of ranks because DeepSpeed averages over them.
The optimiser is torch's AdamW over flat partitions, created without a first dummy step: its `step` count is the number
of updates. State is stored by parameter name as whole tensors, so it does not depend on the number of ranks.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from schemas.errors import LearnerError, NumericsError

if TYPE_CHECKING:
    from schemas.config import OptimizerSection

MOMENTS = ("exp_avg", "exp_avg_sq")


def import_deepspeed() -> Any:
    """DeepSpeed, imported on first use: quiet, on the right accelerator, building no shared-memory operator."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    try:
        import deepspeed
        import deepspeed.ops
        from deepspeed.utils import logger
    except ImportError as error:
        raise LearnerError("cannot import DeepSpeed", found=error, remedy="install deepspeed") from error
    logger.handlers.clear()  # it prints to stdout; its warnings belong into our log
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    # DeepSpeed calls what torch has renamed; nothing a user could do about it.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*deprecated", category=FutureWarning)
    if not torch.cuda.is_available():
        # Private switch: without it gloo compiles a shared-memory operator that a single node on CPU does not need.
        operators = getattr(deepspeed.ops, "__compatible_ops__", None)
        if isinstance(operators, dict) and "deepspeed_shm_comm" in operators:
            operators["deepspeed_shm_comm"] = False
    return deepspeed


def join_process_group() -> tuple[int, int]:
    """(rank, ranks) of the group: the one torchrun describes, or a group of one in this process that needs no port."""
    import torch.distributed as dist

    deepspeed = import_deepspeed()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if not dist.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_PORT" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return dist.get_rank(), dist.get_world_size()


@dataclass(frozen=True)
class StepOutcome:
    """One optimiser step: the gradient norm before clipping, and whether the weights changed."""

    grad_norm: float
    clipped: bool


class Zero3Engine:
    """A module trained under ZeRO-3. `module` is the one DeepSpeed wraps: call `forward`, never the module itself."""

    def __init__(self, module: nn.Module, optimizer: OptimizerSection, dtype: str) -> None:
        self.rank, self.ranks = join_process_group()
        deepspeed = import_deepspeed()
        self.names = [name for name, _ in module.named_parameters()]
        self._max_grad_norm = optimizer.max_grad_norm
        self._adamw = torch.optim.AdamW(
            module.parameters(),
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=self._adamw, config=_configuration(optimizer.max_grad_norm, dtype, self.ranks)
        )
        self.module: nn.Module = self._engine.module
        self.device = torch.device(self._engine.device)

    def forward(self, *inputs: Any) -> Any:
        """Forward pass of the module; every rank must make the same calls."""
        return self._engine(*inputs)

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradient; the accumulated one is that of the sum of losses over calls and ranks."""
        self._engine.backward(loss * self.ranks, scale_wrt_gas=False)

    def step(self, lr: float) -> StepOutcome:
        """Clip the gradient, make one AdamW step, clear it. NumericsError, weights untouched, if it is not finite."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if not self._engine.was_step_applied() or not math.isfinite(norm):
            raise NumericsError(
                "the gradient is not finite; the weights were not changed",
                expected="a finite gradient norm",
                found=norm,
            )
        return StepOutcome(norm, norm > self._max_grad_norm)

    def discard_gradients(self) -> None:
        """Forget what `backward` has added since the last step."""
        self._engine.optimizer.zero_grad()

    def sum_over_ranks(self, numbers: Tensor, *, maximum: bool = False) -> Tensor:
        """Element-wise sum (or maximum) over ranks, float64."""
        import torch.distributed as dist

        total = numbers.detach().to(self.device, torch.float64)
        if self.ranks > 1:
            dist.all_reduce(total, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM)
        return total

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value` (plain data of our own making), in rank order."""
        import torch.distributed as dist

        if self.ranks == 1:
            return [value]
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole float32 tensor on CPU) of every parameter; collective: every rank must iterate to the end."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in self.module.named_parameters():
            yield name, safe_get_full_fp32_param(parameter).detach().float().cpu().clone()

    def full_moments(self, moment: str) -> Iterator[tuple[str, Tensor]]:
        """As `full_parameters`, of one AdamW moment; nothing before the first update."""
        from deepspeed.utils import safe_get_full_optimizer_state

        if self.updates == 0:
            return
        for name, parameter in self.module.named_parameters():
            yield name, safe_get_full_optimizer_state(parameter, moment).detach().float().cpu().clone()

    @property
    def updates(self) -> int:
        """AdamW steps made since the beginning of training."""
        state = next(iter(self._adamw.state.values()), None)
        return int(state["step"]) if state else 0

    def restore(self, updates: int, masters: dict[str, Tensor] | None, moments: dict[str, dict[str, Tensor]]) -> None:
        """Set AdamW's count and moments, and the float32 parameters where they are wider than the model's (`masters`).

        Whole tensors by name; each rank takes its own partition, so they may come from any number of ranks.
        """
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        if updates:
            # AdamW creates its state in the first step; the API below can only fill what is there.
            for flat in self._engine.optimizer.fp32_partitioned_groups_flat:
                self._adamw.state[flat] = {
                    "step": torch.tensor(float(updates), dtype=torch.float32),
                    **{moment: torch.zeros_like(flat, requires_grad=False) for moment in MOMENTS},
                }
        for name, parameter in self.module.named_parameters():
            if masters is not None:
                safe_set_local_fp32_param(parameter, self._partition(masters[name], parameter))
            for moment, tensors in moments.items():
                safe_set_local_optimizer_state(parameter, self._partition(tensors[name], parameter), moment)

    def _partition(self, whole: Tensor, parameter: nn.Parameter) -> Tensor:
        """This rank's slice of a whole tensor, padded with zeros as ZeRO-3 pads the last ones."""
        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        padded = torch.zeros(size * self.ranks, dtype=torch.float32)
        padded[: whole.numel()] = whole.reshape(-1).float()
        return padded[size * self.rank : size * (self.rank + 1)].to(self.device)

    def close(self) -> None:
        """Release hooks and buffers; the process group stays for the next engine."""
        self._engine.destroy()


def _configuration(max_grad_norm: float, dtype: str, ranks: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": ranks,
        "managed_gradient_accumulation": False,
        "gradient_clipping": max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,  # required when the caller owns the accumulation boundary
            "contiguous_gradients": True,
            "reduce_scatter": torch.cuda.is_available(),
            "stage3_param_persistence_threshold": 100_000,
        },
    }
    if dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        settings["communication_data_type"] = "fp32"
    return settings
