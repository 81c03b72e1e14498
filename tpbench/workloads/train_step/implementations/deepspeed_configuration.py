"""The configuration of DeepSpeed's engine for variant autotp."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tpbench.measure.session import Context
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.training.loss_scale import FIRST_FACTOR, PATIENCE

if TYPE_CHECKING:
    from tpbench.workloads.train_step.sharding.plan import Block

_PARTITION_TYPES = {"colwise": "column", "rowwise": "row", "replicated": "skip"}
_PARAMETERS = {"replicated": "[^.]+"}
"""Names of the parameters to which a rule applies, other than the weight: DeepSpeed sums the gradients of each."""


def deepspeed_configuration(problem: TrainStep, context: Context, blocks: Sequence[Block] = ()) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    blocks: how to shard the decoder layers; empty: by the model's own plan, which DeepSpeed reads itself.
    """
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
        }
        if blocks:
            configuration["tensor_parallel"]["partition_config"] = _partition(blocks)
    return configuration | _dtype_settings(problem)


def _dtype_settings(problem: TrainStep) -> dict[str, Any]:
    """Return the settings by which parameters, gradients and states have the problem's dtype, as in every variant.

    For float16, DeepSpeed keeps the fp32 parameters in the optimizer and computes with a copy in float16.
    """
    if problem.dtype == "float16":
        # As in `loss_scale.LossScale`: the factor is halved at each overflow, and doubled after `PATIENCE` steps
        # without one.
        scale = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": int(math.log2(FIRST_FACTOR)),
            "loss_scale_window": PATIENCE,
            "hysteresis": 1,
            "min_loss_scale": 1,
        }
        return {"fp16": scale}
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


def _partition(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the plan in DeepSpeed's words: a rule for each module, and one for a head whose logits are gathered.

    Blocks that gather columns are left out: their layers are in the model already.
    """
    rules = [
        {
            "patterns": [f".*{re.escape(name)}\\.{_PARAMETERS.get(style, 'weight')}$"],
            "partition_type": _PARTITION_TYPES[style],
            "grad_allreduce": style == "replicated" and block.sharded_inside,
        }
        for block in blocks
        if not block.gathers_columns
        for name, style in block.styles.items()
    ]
    head = {"patterns": [".*lm_head\\.weight$"], "partition_type": "column", "gather_output": True}
    return {"use_default_specs": False, "layer_specs": [*rules, head]}
