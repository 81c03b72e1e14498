"""autotp: DeepSpeed's automatic tensor parallelism by the model's own plan, with ZeRO over replicas."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.measure.session import Context
from tpbench.workloads.train_step import losses, models
from tpbench.workloads.train_step.batches import Batch
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.trainer import Loss, Mark, Place, adamw, model_inputs, no_mark


class Replicas:
    """DeepSpeed's `mpu`, before it has groups of its own: how many ranks share a batch, for the batch's arithmetic."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def get_data_parallel_world_size(self) -> int:
        return self.context.dp_size


class DeepSpeedTrainer:
    """DeepSpeed's engine. Its step does the averaging, clipping and clearing."""

    def __init__(self, problem: TrainStep, context: Context) -> None:
        deepspeed = imported(context.device)
        self.problem, self.context = problem, context
        model = models.build(problem)
        # AutoTP cuts a whole model: at the start each rank holds all of it.
        models.materialise(model, context.device, problem.seed)
        if problem.compile:
            models.compile_layers(model)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=lambda parameters: adamw(_flat(parameters), problem, context.device),
            model_parameters=list(model.parameters()),
            mpu=Replicas(context) if context.tp_size > 1 else None,
            dist_init_required=False,
            config=engine_configuration(problem, context),
        )
        self.model = self.engine.module
        self.loss = _loss(problem, self.model)
        self.inputs = model_inputs(problem, context.device)

    def accumulate(self, batches: Sequence[Batch], mark: Mark = no_mark) -> Tensor:
        """The engine divides by the number of micro-batches, and counts them to know the last."""
        total = torch.zeros((), dtype=torch.float32, device=self.context.device)
        for index, batch in enumerate(batches):
            if index:
                self.engine.step()  # no update: it moves on to the next micro-batch
            mark("forward")
            logits = self.engine(input_ids=batch.tokens, **self.inputs).logits
            loss = self.loss(logits, batch.labels)
            mark("backward")
            self.engine.backward(loss)
            total += loss.detach() / len(batches)
        return total

    def update(self, mark: Mark = no_mark) -> Tensor:
        mark("optimizer")
        norm = None if self.problem.zero_stage else self._norm()
        self.engine.step()
        if norm is None:
            norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=self.context.device)
        return norm

    def _norm(self) -> Tensor:
        """Of gradients that ZeRO leaves alone, where DeepSpeed keeps no norm: shards add up over the tensor-parallel
        ranks, what they all have counts once."""
        from deepspeed.runtime.utils import is_model_parallel_parameter

        counted = [
            parameter.grad
            for parameter in self.model.parameters()
            if parameter.grad is not None and (is_model_parallel_parameter(parameter) or self.context.tp_rank == 0)
        ]
        total = torch.stack(torch._foreach_norm(counted, 2, dtype=torch.float32)).square().sum()
        dist.all_reduce(total, group=self.context.tp_group)
        return total.sqrt()


def engine_configuration(problem: TrainStep, context: Context) -> dict[str, Any]:
    """DeepSpeed's configuration. Parameters, gradients and states in the problem's dtype, as for every variant."""
    zero: dict[str, Any] = {"stage": problem.zero_stage}
    if problem.zero_stage:
        zero |= {"overlap_comm": context.device.type == "cuda", "contiguous_gradients": True}
    made: dict[str, Any] = {
        "train_batch_size": problem.batch_size * problem.accumulate * context.dp_size,
        "train_micro_batch_size_per_gpu": problem.batch_size,
        "gradient_accumulation_steps": problem.accumulate,
        "gradient_clipping": problem.max_grad_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31 - 1,
    }
    if context.tp_size > 1:
        made["tensor_parallel"] = {
            "autotp_size": context.tp_size,
            "vocab_parallel_lm_head": problem.vocab_parallel,
            "tp_overlap_comm": problem.overlap,
        }
    if problem.autocast:
        made["torch_autocast"] = {"enabled": True, "dtype": problem.dtype}
    elif problem.dtype == "bfloat16":
        made["communication_data_type"] = "bf16"
        if problem.zero_stage:  # without, ZeRO keeps its own copy and moments in fp32
            made["bf16"] = {
                "enabled": True,
                "bf16_master_weights_and_grads": True,
                "bf16_optimizer_states": True,
                "check_grad_overflow": False,  # of every gradient by itself, in seven small operations
            }
            made["data_types"] = {"grad_accum_dtype": "bf16"}
    return made


def imported(device: torch.device) -> Any:
    """The package, set to this rank's kind of device and not to build its operator for shared memory between CPU ranks:
    a build that is killed leaves a lock on which the next one waits for ever."""
    os.environ["DS_ACCELERATOR"] = device.type
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if device.type == "cuda":
        # Its own asks NVML by the numbers in CUDA_VISIBLE_DEVICES, where there may be names.
        deepspeed.get_accelerator().available_memory = lambda index=None: torch.cuda.mem_get_info(index)[0]
    deepspeed.utils.logger.setLevel(logging.WARNING)
    return deepspeed


def _loss(problem: TrainStep, model: Any) -> Loss:
    """Of the whole logits, or of what the sharded head leaves here: DeepSpeed's vocabulary-parallel loss, or ours."""
    from deepspeed.module_inject.layers import VocabParallelLinear

    head = next((each for each in model.modules() if isinstance(each, VocabParallelLinear)), None)
    if head is None:
        return losses.whole(problem)
    if problem.train_loss == "tpbench":
        return losses.ours(head.mp_group, head.vocab_start_index, problem.vocab)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = model.loss_function(logits, shift_labels=labels)
        return result

    return loss


def _flat(parameters: Any) -> list[Tensor]:
    return [each for group in parameters for each in (group["params"] if isinstance(group, dict) else [group])]


def prepare(problem: TrainStep, place: Place) -> DeepSpeedTrainer:
    """The engine on this rank."""
    return DeepSpeedTrainer(problem, place.context)
