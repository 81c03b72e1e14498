"""Speed of a run: tokens per second, model FLOPs utilisation (MFU), and lines of progress during training."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tpbench.measure.session import Context
from tpbench.workloads.train_step.model import sizes
from tpbench.workloads.train_step.problem import TrainStep

PEAK_TFLOPS = {
    "H100 PCIe": (756, 378),
    "H100 NVL": (835, 418),
    "H100": (989, 495),
    "H200": (989, 495),
    "H800": (989, 495),
    "H20": (148, 74),
    "GH200": (989, 495),
    "A100": (312, 156),
    "A800": (312, 156),
    "B200": (2250, 1100),
    "B100": (1800, 900),
    "L40S": (362, 183),
    "A10": (125, 62),
}
"""Dense peaks of NVIDIA's datasheets in TFLOP/s, by GPU: (bf16 and fp16, TF32).

TF32 stands for float32, although torch does not use it by default. The first entry that matches a GPU's name applies.
"""


def throughput(problem: TrainStep, context: Context, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of throughput from the median step's time: device time if there is one, else wall time."""
    seconds = (columns.get("device_ms") or columns["time_ms"]) / 1e3
    samples = problem.batch_size * problem.accumulate * context.dp_size
    tokens_per_s_per_gpu = samples * problem.seq_length / seconds / context.world_size
    result = {
        "tokens_per_s": tokens_per_s_per_gpu * context.world_size,
        "tokens_per_s_per_gpu": tokens_per_s_per_gpu,
        "samples_per_s": samples / seconds,
        "samples_per_s_per_gpu": samples / seconds / context.world_size,
        "tflops_per_gpu": columns["flops"] / seconds / 1e12,
    }
    if context.device.type == "cuda":
        peak = peak_tflops(torch.cuda.get_device_name(context.device), problem.dtype)
        if peak is not None:
            result |= {"peak_tflops": peak, "mfu": sizes.flops_per_token(problem) * tokens_per_s_per_gpu / 1e12 / peak}
    return result


def peak_tflops(gpu_name: str, dtype: str) -> float | None:
    """Return the datasheet's peak in TFLOP/s, or None for a GPU that is not in the table."""
    words = gpu_name.replace("-", " ").split()
    for name, (half, single) in PEAK_TFLOPS.items():
        if all(word in words for word in name.split()):
            return float(single if dtype == "float32" else half)
    return None


class ProgressLines:
    """Lines on rank 0's stderr, one every `log_interval` steps: step, loss, tokens/s of wall time since the last line.

    They are written between steps, so they cost no measured time.
    """

    def __init__(self, problem: TrainStep, context: Context) -> None:
        self.context, self.interval = context, problem.log_interval if context.rank == 0 else 0
        self.last_step = problem.warmup_steps + problem.steps
        self.tokens_per_step = problem.tokens * problem.accumulate * context.dp_size
        self.reported_steps = 0
        self.reported_at_s = time.perf_counter()

    def report(self, steps_done: int, losses: Sequence[torch.Tensor]) -> None:
        """Write a line if one is due. `losses` are this replica's losses of the steps so far, on the device.

        A step after the measured ones, for a profile, gets no line.
        """
        if not self.interval or steps_done % self.interval or not self.reported_steps < steps_done <= self.last_step:
            return
        self.reported_steps = steps_done
        loss, now_s = float(losses[-1]), time.perf_counter()
        rate = self.interval * self.tokens_per_step / (now_s - self.reported_at_s)
        self.reported_at_s = now_s
        self.context.say(f"step {steps_done}/{self.last_step}: loss {loss:.4f}, {rate:.0f} tokens/s")
