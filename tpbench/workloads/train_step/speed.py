"""Tokens a second, model FLOPs utilisation, and the lines of progress."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tpbench.measure.session import Context
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
"""Dense peaks by NVIDIA's datasheets, in TFLOP/s: of bf16 and fp16, and of TF32 (for float32, though torch's default
does not use it). The first name found in the GPU's counts."""


def throughput(problem: TrainStep, context: Context, columns: Mapping[str, Any]) -> dict[str, Any]:
    """By the median step: device time where there is one, else wall time."""
    seconds = (columns.get("device_ms") or columns["time_ms"]) / 1e3
    samples = problem.batch_size * problem.accumulate * context.dp_size
    tflops = columns["flops"] / seconds / 1e12
    found = {
        "tokens_per_s": samples * problem.seq_length / seconds,
        "tokens_per_s_per_gpu": samples * problem.seq_length / seconds / context.world_size,
        "samples_per_s": samples / seconds,
        "samples_per_s_per_gpu": samples / seconds / context.world_size,
        "tflops_per_gpu": tflops,
    }
    if context.device.type == "cuda":
        peak = peak_tflops(torch.cuda.get_device_name(context.device), problem.dtype)
        if peak is not None:
            found |= {"peak_tflops": peak, "mfu": tflops / peak}
    return found


def peak_tflops(gpu_name: str, dtype: str) -> float | None:
    """The datasheet's peak, or None for a GPU that is not in the table."""
    words = gpu_name.replace("-", " ").split()
    for name, (half, single) in PEAK_TFLOPS.items():
        if all(word in words for word in name.split()):
            return float(single if dtype == "float32" else half)
    return None


class Progress:
    """A line on rank 0's stderr every few steps: step, loss, tokens/s of the wall time since the last line. Told
    between steps, so it costs no measured time."""

    def __init__(self, problem: TrainStep, context: Context) -> None:
        self.context, self.interval = context, problem.log_interval if context.rank == 0 else 0
        self.last = problem.warmup_steps + problem.steps
        self.tokens = problem.tokens * problem.accumulate * context.dp_size
        self.told = 0
        self.since = time.perf_counter()

    def tell(self, done: int, losses: Sequence[torch.Tensor]) -> None:
        """`done` steps are done, and left these losses (this replica's, on the device). Of those that only time phases
        it says nothing."""
        if not self.interval or done % self.interval or not self.told < done <= self.last:
            return
        self.told = done
        loss, now = float(losses[-1]), time.perf_counter()
        rate = self.interval * self.tokens / (now - self.since)
        self.since = now
        self.context.say(f"step {done}/{self.last}: loss {loss:.4f}, {rate:.0f} tokens/s")
