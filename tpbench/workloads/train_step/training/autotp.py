"""Variant autotp: DeepSpeed's automatic tensor parallelism by the model's own plan, with ZeRO over replicas."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.measure.session import Context
from tpbench.workloads.train_step.model import models
from tpbench.workloads.train_step.model.inputs import Batch, model_inputs
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sharding.plan import Block, blocks
from tpbench.workloads.train_step.training.losses import Loss, loss_of
from tpbench.workloads.train_step.training.trainer import MarkPhase, adamw, ignore_phase

_PARTITION_TYPES = {"colwise": "column", "rowwise": "row", "replicated": "skip"}


class DeepSpeedTrainer:
    """A Trainer around DeepSpeed's engine, whose step averages, clips and clears the gradients."""

    def __init__(self, problem: TrainStep, context: Context) -> None:
        deepspeed = import_deepspeed(context.device)
        self.problem, self.context = problem, context
        model = models.build(problem)
        plan = blocks(problem, model) if context.tp_size > 1 else {}
        # AutoTP shards a complete model, so at first each rank holds all of it.
        models.materialise(model, context.device, problem.seed)
        if context.tp_size > 1 and problem.vocab_parallel and not problem.tied:
            _shard_embedding(model, context.tp_group)
        # DeepSpeed computes the batch size before it has process groups of its own. For that, `mpu` tells it how many
        # ranks have different batches.
        mpu = SimpleNamespace(get_data_parallel_world_size=lambda: context.dp_size)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=lambda _: adamw(list(model.parameters()), problem, context),  # which are shards by then
            model_parameters=list(model.parameters()),
            mpu=mpu if context.tp_size > 1 else None,
            dist_init_required=False,
            config=deepspeed_configuration(problem, context, plan),
        )
        self.model = self.engine.module
        self.parameters = list(self.model.parameters())
        self.loss = _loss(problem, self.model)
        self.inputs = model_inputs(problem, context.device)

    def accumulate(self, batches: Sequence[Batch], mark: MarkPhase = ignore_phase) -> Tensor:
        """The engine divides gradients by the number of micro-batches, and counts micro-batches to know the last."""
        total = torch.zeros((), dtype=torch.float32, device=self.context.device)
        for index, batch in enumerate(batches):
            if index:
                self.engine.step()  # not an update: the engine advances to the next micro-batch
            mark("forward")
            logits = self.engine(input_ids=batch.tokens, **self.inputs).logits
            loss = self.loss(logits, batch.labels)
            mark("backward")
            self.engine.backward(loss)
            total += loss.detach() / len(batches)
        return total

    def update(self, mark: MarkPhase = ignore_phase) -> Tensor:
        mark("optimizer")
        norm: Any = None if self.problem.zero_stage else self._norm_without_zero()
        self.engine.step()
        norm = self.engine.get_global_grad_norm() if norm is None else norm
        if getattr(self.engine.optimizer, "overflow", False):
            norm = torch.inf  # of fp16 gradients: there was no update
        return torch.as_tensor(norm, dtype=torch.float32, device=self.context.device)

    def _norm_without_zero(self) -> Tensor:
        """Return the norm of all gradients, which DeepSpeed doesn't keep. A replicated gradient counts once."""
        from deepspeed.runtime.utils import is_model_parallel_parameter

        grads = [
            parameter.grad
            for parameter in self.parameters
            if parameter.grad is not None and (is_model_parallel_parameter(parameter) or self.context.tp_rank == 0)
        ]
        squares = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).square().sum()
        dist.all_reduce(squares, group=self.context.tp_group)
        return squares.sqrt()


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
        # DeepSpeed refuses fp16 on CPUs without instructions for it. torch computes it on every CPU.
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.utils.logger.setLevel(logging.WARNING)
    return deepspeed


def _loss(problem: TrainStep, model: Any) -> Loss:
    """Return the loss of whole logits or, if the head is sharded, DeepSpeed's or another vocabulary-parallel loss."""
    from deepspeed.module_inject.layers import VocabParallelLinear

    head = next((module for module in model.modules() if isinstance(module, VocabParallelLinear)), None)
    if head is None:
        return loss_of(problem, model)
    if problem.train_loss != "torch":
        return loss_of(problem, model, head.mp_group, head.vocab_start_index)

    return lambda logits, labels: model.loss_function(logits, shift_labels=labels)  # type: ignore[no-any-return]


def deepspeed_configuration(problem: TrainStep, context: Context, plan: Mapping[str, Block]) -> dict[str, Any]:
    """Return DeepSpeed's configuration. By a plan that it reads itself, it would not sum the norms' gradients."""
    zero: dict[str, Any] = {"stage": problem.zero_stage}
    if problem.zero_stage:
        zero |= {"overlap_comm": context.device.type == "cuda", "contiguous_gradients": True}
    configuration: dict[str, Any] = {
        "train_batch_size": problem.batch_size * problem.accumulate * context.dp_size,
        "train_micro_batch_size_per_gpu": problem.batch_size,
        "gradient_accumulation_steps": problem.accumulate,
        "gradient_clipping": problem.max_grad_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31 - 1,
        # DeepSpeed's own measurement of throughput waits for the device twice in each step.
        "timers": {"throughput": {"enabled": False}},
    }
    if context.tp_size > 1:
        configuration["tensor_parallel"] = {
            "autotp_size": context.tp_size,
            "vocab_parallel_lm_head": problem.vocab_parallel,
            "tp_overlap_comm": problem.overlap,
            "partition_config": _partition(plan),
        }
    return configuration | _dtype_settings(problem)


def _dtype_settings(problem: TrainStep) -> dict[str, Any]:
    if problem.dtype == "float16":  # the optimizer has the parameters in fp32, and DeepSpeed computes with a copy
        return {"fp16": {"enabled": True, "hysteresis": 1}}
    if problem.autocast:
        return {"torch_autocast": {"enabled": True, "dtype": problem.dtype}}
    if problem.dtype == "float32":
        return {}
    settings: dict[str, Any] = {"communication_data_type": "bf16"}
    if problem.zero_stage:  # by default, ZeRO keeps its own copy of the parameters and the moments in fp32
        settings["bf16"] = {
            "enabled": True,
            "bf16_master_weights_and_grads": True,
            "bf16_optimizer_states": True,
            "check_grad_overflow": False,  # DeepSpeed would check each gradient by seven small operations
        }
        settings["data_types"] = {"grad_accum_dtype": "bf16"}
    return settings


def _partition(plan: Mapping[str, Block]) -> dict[str, Any]:
    rules = [
        {
            # DeepSpeed sums the gradients of each parameter of a replicated module.
            "patterns": [f".*{re.escape(name)}\\.{'[^.]+' if style == 'replicated' else 'weight'}$"],
            "partition_type": _PARTITION_TYPES[style],
            "grad_allreduce": style == "replicated",
        }
        for block in plan.values()
        for name, style in block.items()
    ]
    head = {"patterns": [".*lm_head\\.weight$"], "partition_type": "column", "gather_output": True}
    return {"use_default_specs": False, "layer_specs": [*rules, head]}


def _shard_embedding(model: Any, group: Any) -> None:
    """Replace an embedding, which AutoTP would leave whole, by a sharded one before the engine makes an optimizer."""
    import deepspeed
    from deepspeed.module_inject import layers

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_init_required=False)  # DeepSpeed's wrapper of the existing process groups
    layers.set_autotp_mode(training=True)  # otherwise the layer would freeze its weight
    embedding = layers.VocabParallelEmbedding(model.get_input_embeddings(), group, name="embed_tokens")
    embedding.replaced = True  # AutoTP leaves such a module alone
    model.set_input_embeddings(embedding)
