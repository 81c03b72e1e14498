"""fast_train: train a whole model on data-parallel replicas."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from tpbench.api.train_step import Context, TorchTrainer, TrainStep, models, torch_loss, variant


def _no_tensor_parallel(problem: TrainStep, tp_size: int) -> str | None:
    """Return why the variant cannot run a problem, or None. Such a cell is skipped with this reason."""
    return None if tp_size == 1 else "it does not shard the model: it needs tp_size=1"


@variant(
    "DistributedDataParallel",
    workload="train_step",
    requires=("transformers",),
    unsupported_reason=_no_tensor_parallel,
)
def fast_train(problem: TrainStep, context: Context) -> TorchTrainer:
    """Make the model and its trainer. tpbench times each step, and compares the losses with a run on one process."""
    model = models.build(problem)
    models.materialise(model, context.device, problem.seed)
    devices = [context.device.index] if context.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=devices, process_group=context.dp_group)

    def during_micro_batch(last: bool) -> AbstractContextManager[Any]:
        """Reduce gradients in the last micro-batch only."""
        return contextlib.nullcontext() if last else wrapped.no_sync()

    return TorchTrainer(problem, wrapped, context, torch_loss, during_micro_batch)
