"""Variant autotp: DeepSpeed's automatic tensor parallelism by the model's own plan, with ZeRO over replicas."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.measure.session import Context
from tpbench.workloads.train_step.implementations.deepspeed_configuration import deepspeed_configuration
from tpbench.workloads.train_step.implementations.deepspeed_layers import (
    replace_layers,
    scale_embedding,
    take_embedding_scale,
)
from tpbench.workloads.train_step.model import models
from tpbench.workloads.train_step.model.inputs import model_inputs
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sharding.plan import Block, plan_of_transformers
from tpbench.workloads.train_step.sharding.plan_requirements import require_plan
from tpbench.workloads.train_step.sharding.styles import PLANS
from tpbench.workloads.train_step.training import losses
from tpbench.workloads.train_step.training.batches import Batch
from tpbench.workloads.train_step.training.gradients import clip_divisor
from tpbench.workloads.train_step.training.phases import MarkPhase, ignore_phase
from tpbench.workloads.train_step.training.trainer import adamw, capturable


class DeepSpeedTrainer:
    """A Trainer around DeepSpeed's engine, whose step averages, clips and clears the gradients."""

    def __init__(self, problem: TrainStep, context: Context) -> None:
        deepspeed = import_deepspeed(context.device)
        self.problem, self.context = problem, context
        model = models.build(problem)
        blocks = require_plan(problem, model, context.tp_size) if context.tp_size > 1 else []
        # AutoTP shards a complete model, so at first each rank holds all of it.
        models.materialise(model, context.device, problem.seed)
        scale = take_embedding_scale(model) if context.tp_size > 1 and problem.vocab_parallel else None
        if context.tp_size > 1:
            replace_layers(problem, model, blocks, context.tp_group)
        if problem.compile:
            models.compile_layers(model)
        # DeepSpeed computes the batch size before it has process groups of its own. For that, `mpu` tells it how many
        # ranks have different batches.
        mpu = SimpleNamespace(get_data_parallel_world_size=lambda: context.dp_size)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=lambda parameters: adamw(_flat(parameters), problem, capturable=capturable(context)),
            model_parameters=list(model.parameters()),
            mpu=mpu if context.tp_size > 1 else None,
            dist_init_required=False,
            config=deepspeed_configuration(problem, context, [] if _reads_plan(problem, model, blocks) else blocks),
        )
        if scale is not None:
            scale_embedding(model, scale)
        self.model = self.engine.module
        self.parameters = list(self.model.parameters())
        self.loss = _loss(problem, self.model)
        # Without ZeRO, the engine divides float16 gradients by the loss scale but does not scale the loss (0.19.8).
        unscaled = problem.dtype == "float16" and not problem.zero_stage
        if unscaled:
            _forget_first_step(self.engine.optimizer)
        self.missing_scale = (lambda: self.engine.optimizer.loss_scale_config.cur_scale) if unscaled else None
        # Arguments of the engine may not contain a dictionary of masks: DeepSpeed compares them between the ranks.
        inputs = model_inputs(problem, context.device)
        self.model.register_forward_pre_hook(lambda _, args, named: (args, {**named, **inputs}), with_kwargs=True)

    def accumulate(self, batches: Sequence[Batch], mark: MarkPhase = ignore_phase) -> Tensor:
        """The engine divides gradients by the number of micro-batches, and counts micro-batches to know the last."""
        total = torch.zeros((), dtype=torch.float32, device=self.context.device)
        for index, batch in enumerate(batches):
            if index:
                self.engine.step()  # not an update: the engine advances to the next micro-batch
            mark("forward")
            logits = self.engine(input_ids=batch.tokens).logits
            loss = self.loss(logits, batch.labels)
            mark("backward")
            self.engine.backward(loss if self.missing_scale is None else loss * self.missing_scale())
            total += loss.detach() / len(batches)
        return total

    def update(self, mark: MarkPhase = ignore_phase) -> Tensor:
        mark("optimizer")
        if self.context.graph:
            return self._update_on_device()
        norm = None if self.problem.zero_stage else self._norm_without_zero()
        if norm is not None and self.missing_scale is not None:
            norm /= self.missing_scale()
        self.engine.step()
        if getattr(self.engine.optimizer, "overflow", False):
            norm = torch.full((), torch.inf, device=self.context.device)  # the step was skipped
        elif norm is None:
            norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=self.context.device)
        return norm

    @torch.no_grad()
    def _update_on_device(self) -> Tensor:
        """Clip and update as the engine does with ZeRO stage 0. The engine itself reads the norm on the host."""
        norm = self._norm_without_zero()
        self.engine.optimizer.grad_scale = clip_divisor(norm, self.problem.max_grad_norm)
        self.engine.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.engine.micro_steps += 1  # the engine's count of micro-batches tells it which one is the last of a step
        return norm

    def _norm_without_zero(self) -> Tensor:
        """Return the norm of gradients with ZeRO stage 0, for which DeepSpeed keeps no norm.

        Shards are summed over the tensor-parallel ranks. A replicated gradient counts once.
        """
        from deepspeed.runtime.utils import is_model_parallel_parameter

        grads = [
            parameter.grad
            for parameter in self.parameters
            if parameter.grad is not None and (is_model_parallel_parameter(parameter) or self.context.tp_rank == 0)
        ]
        squares = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).square().sum()
        dist.all_reduce(squares, group=self.context.tp_group)
        return squares.sqrt()


def _reads_plan(problem: TrainStep, model: Any, blocks: Sequence[Block]) -> bool:
    """Return whether DeepSpeed reads the model's own plan as it is.

    Without a plan it would shard by names, and would not sum the gradients of norms over the ranks.
    """
    if problem.tp_mapping or problem.architecture in PLANS:
        return False
    plan = plan_of_transformers(model)
    return bool(plan) and not any(block.gathers_columns or _hides_gradients(model, block, plan) for block in blocks)


def _hides_gradients(model: Any, block: Block, plan: Mapping[str, str]) -> bool:
    """Return whether a replicated module of a sharded block has parameters whose gradients the plan does not sum.

    DeepSpeed sums those of the `weight` of a module that the plan names (0.19.8).
    """
    prefix = f"{model.base_model_prefix}."
    named = [pattern for pattern, style in plan.items() if style == "replicated_with_grad_allreduce"]
    return block.sharded_inside and any(
        {each for each, _ in model.get_submodule(name).named_parameters(recurse=False)} != {"weight"}
        or not any(fnmatchcase(name.removeprefix(prefix), pattern) for pattern in named)
        for name, style in block.styles.items()
        if style == "replicated"
    )


def _forget_first_step(optimizer: Any) -> None:
    """Undo the step by which DeepSpeed's fp16 optimizer without ZeRO makes its states.

    That step has zero gradients, but Adam counts it for its bias correction, and it decays the weights.
    """
    optimizer.optimizer.state.clear()
    for masters, copies in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, copy in zip(masters, copies, strict=True):
            master.data.copy_(copy.data)


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for this rank's kind of device.

    Its operator for shared memory between CPU ranks is disabled: DeepSpeed would build it, and a build that is killed
    leaves a lock on which every later build waits forever.
    """
    os.environ["DS_ACCELERATOR"] = device.type
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if device.type == "cuda":
        # DeepSpeed's own function passes entries of CUDA_VISIBLE_DEVICES to NVML as numbers, but they may be names.
        deepspeed.get_accelerator().available_memory = lambda index=None: torch.cuda.mem_get_info(index)[0]
    else:
        # DeepSpeed refuses float16 on CPUs without instructions for it. PyTorch computes it on every CPU.
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.utils.logger.setLevel(logging.WARNING)
    return deepspeed


def _loss(problem: TrainStep, model: Any) -> losses.Loss:
    """Return the loss of whole logits or, if the head is sharded, DeepSpeed's or tpbench's vocabulary-parallel loss."""
    from deepspeed.module_inject.layers import VocabParallelLinear

    head = next((module for module in model.modules() if isinstance(module, VocabParallelLinear)), None)
    if head is None:
        return losses.loss_of_whole_logits(problem, model)
    if problem.train_loss == "tpbench_linear":
        return losses.tpbench_linear_loss(problem, head, head.mp_group, head.vocab_start_index)
    if problem.train_loss == "tpbench":
        return losses.tpbench_loss(head.mp_group, head.vocab_start_index, problem.vocab)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = model.loss_function(logits, shift_labels=labels)
        return result

    return loss


def _flat(parameters: Any) -> list[Tensor]:
    return [each for group in parameters for each in (group["params"] if isinstance(group, dict) else [group])]
