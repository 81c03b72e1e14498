"""Synthetic rows for tests, modelled on published timings of an H200. They are not measured.

The rows are deterministic and are written like those of a sweep. Times follow a simple formula that tests know.
"""

import datetime
import hashlib
import json
import zlib

import numpy as np

from tpbench.results.write import write_row

COPY = 4230.0
START = datetime.datetime(2026, 11, 20, 12, tzinfo=datetime.UTC)
MACHINE = {
    "device": "cuda", "gpu_name": "NVIDIA H200", "gpu_count": 4, "nodes": 1, "host": "made-up", "backend": "nccl",
    "driver_version": "580.1", "cuda_version": "13.0", "nccl_version": "2.28.9", "torch_version": "2.11.0",
    "triton_version": "3.6.0", "python_version": "3.11.2", "os": "Linux", "cpu_model": "EPYC 9654", "cpu_count": 32,
}  # fmt: skip
SIZES = ((32768, 1), (65536, 1), (131072, 1), (32768, 2), (32768, 4), (65536, 4), (131072, 4))
LOSSES = ("cross_entropy", "reverse_kl")
VARIANTS = ("triton_tp", "pytorch_tp_manual", "pytorch_gather")


def device_ms(variant, tokens, vocab, tp_size, loss):
    """Return the device time of a cell by the formula, in ms."""
    logits = 1 if loss == "cross_entropy" else 2
    shard = tokens * -(-vocab // tp_size) * 2 / 1e6 / COPY * 1e0  # ms to read a shard once
    exchange = 0 if tp_size == 1 else 0.006 * np.log2(2 * tp_size)
    if variant == "triton_tp":
        return 0.004 + 1.2 * (logits + 1) * shard + exchange
    if variant == "pytorch_tp_manual":
        return 0.03 + 17 * (logits + 1) * shard + 3 * exchange
    wire = logits * tokens * vocab * 2 * (tp_size - 1) / tp_size / 1e6 / 450
    return 0.05 + wire + 28 * (logits + 1) / 2 * shard * tp_size + exchange


def peak_gib(variant, tokens, vocab, tp_size, loss):
    logits = 1 if loss == "cross_entropy" else 2
    shard, full = tokens * -(-vocab // tp_size) / 2**30, tokens * vocab / 2**30
    if variant == "triton_tp":
        return 2 * shard + 16 * tokens / 2**30
    return 14 * shard * logits if variant == "pytorch_tp_manual" else 14.5 * full * logits


def samples(median, name, count=120, noise=0.01):
    random = np.random.default_rng(zlib.crc32(name.encode()))
    made = median * (1 + noise * random.standard_normal(count))
    made[:2] *= 1.4
    return np.sort(made)[random.permutation(count)]


def cell(
    variant, vocab, tp_size, loss="cross_entropy", *, tokens=4096, block_cap="auto", factor=1.0, run="", **changes
):
    """Return one row as a mapping."""
    problem = {
        "tokens": tokens, "vocab": vocab, "loss": loss, "dtype": "bfloat16", "seed": 0, "logits_scale": 1.0,
        "temperature": 1.0, "ignored": 0.0, "block_cap": block_cap, "compile": False, "compute_dtype": "float32",
    }  # fmt: skip
    flat = {"workload": "entropy_loss", "variant": variant, "tp_size": tp_size, "dp_size": 1, **problem}
    name = json.dumps(flat, sort_keys=True)
    logits = 1 if loss == "cross_entropy" else 2
    moved = (logits + 1) * tokens * -(-vocab // tp_size) * 2 + (8 * tokens if logits == 1 else 0)
    sent = 12 * tokens * (tp_size - 1)
    if variant == "pytorch_gather" and tp_size > 1:
        sent = logits * tokens * -(-vocab // tp_size) * 2 * (tp_size - 1)
    device = samples(factor * device_ms(variant, tokens, vocab, tp_size, loss), f"device{name}{run}")
    wall = samples(np.median(device) + 0.04 + (0.3 if variant == "pytorch_tp_manual" else 0.06), f"wall{name}{run}")
    peak = peak_gib(variant, tokens, vocab, tp_size, loss)
    row = MACHINE | flat | {
        "status": "ok", "reason": None, "world_size": tp_size, "interpreted": False, "graph": False, "warmed_up": True,
        "key": hashlib.sha256(name.encode()).hexdigest()[:16], "job": name, "loss_value": 10.5, "loss_error": 1e-6,
        "grad_error": 2e-3, "floor_ms": moved / COPY / 1e6, "bytes_moved": moved, "bytes_communicated": sent,
        "copy_gb_per_s": COPY, "iterations": len(wall), "skew_ms": 0.004, "peak_gib": peak,
        "rank_peak_gib": [peak] * tp_size, "samples_ms": wall, "device_samples_ms": device, "block_cap": str(block_cap),
        "sm_clock_mhz": 1980.0, "memory_limit_gib": 139.8, "loss_identical": True,
    }  # fmt: skip
    for prefix, of in (("time", wall), ("device", device)):
        p5, median, p95 = np.percentile(of, [5, 50, 95])
        low, high = np.percentile(of, [45, 55])
        row |= {
            f"{prefix}_ms": median, f"{prefix}_p5_ms": p5, f"{prefix}_p95_ms": p95, f"{prefix}_min_ms": of.min(),
            f"{prefix}_ci_low_ms": low, f"{prefix}_ci_high_ms": high,
        }  # fmt: skip
    row["fraction_of_floor"] = row["floor_ms"] / row["device_ms"]
    row["gb_per_s"] = moved / row["device_ms"] / 1e6
    row |= changes
    if row["status"] != "ok":
        for name in [name for name in row if "_ms" in name or name in ("fraction_of_floor", "gb_per_s", "peak_gib")]:
            row[name] = None
        row["rank_peak_gib"] = None
    return row


def cells(**changes):
    """Iterate over a whole table: three variants, seven sizes, two losses, a block-cap study, and failed cells."""
    for loss in LOSSES:
        for vocab, tp_size in SIZES:
            for variant in VARIANTS:
                yield cell(variant, vocab, tp_size, loss, **changes)
    for vocab in (32768, 65536, 131072):
        for cap, factor in ((4096, 1.3), (8192, 1.1), (16384, 1.05), (32768, 1.9)):
            yield cell("triton_tp", vocab, 1, block_cap=cap, **({"factor": factor} | changes))
    failed = {"status": "oom", "reason": "rank 0 ran out of memory asking for 40 GiB", "oom_bytes": 40 * 2**30}
    yield cell("pytorch_gather", 131072, 4, tokens=65536, **failed)
    yield cell("triton_tp", 131072, 4, tokens=65536)
    for variant in VARIANTS:
        yield cell(variant, 131072, 8, status="skipped", reason="needs 8 GPUs, found 4")


def write(rows, folder, prefix="r"):
    """Write the rows to `folder`, one second apart, and return the folder."""
    for index, row in enumerate(rows):
        moment = START + datetime.timedelta(seconds=index)
        write_row({"started_at": moment, "finished_at": moment, "cell": index, **row}, folder, f"{prefix}{index}")
    return folder
