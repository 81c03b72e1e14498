"""JSON documents, made from rows of the train step."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

import tpbench
from tpbench.workloads.train_step.problem import PHASES

GB_PER_GIB = 2**30 / 1e9


def json_document(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the file name (without ending) and the content for a measured row, or None for any other row.

    The content is the job as `config`, every measured step, and a summary, as an older benchmark of AutoTP and FSDP2
    writes them. Steps count from the first warm-up step, 0. Times are device times if the row has them. GB are 10^9
    bytes.
    """
    if row.get("status") != "ok":
        return None
    samples_ms = row["samples_ms"] if row["device_samples_ms"] is None else row["device_samples_ms"]
    job, count, seconds = json.loads(row["job"]), len(samples_ms), [ms / 1e3 for ms in samples_ms]
    samples = job["batch_size"] * job["accumulate"] * row["dp_size"]
    tokens = samples * job["seq_length"]
    losses = list(row["losses"])[-count:]
    phases_s = {phase: [ms / 1e3 for ms in row[f"step_{phase}_ms"]] for phase in PHASES}
    columns: dict[str, Iterable[Any]] = {
        "step": range(job["warmup_steps"], job["warmup_steps"] + count),
        "loss": losses,
        "step_time_s": seconds,
        **{f"{phase}_time_s": times_s for phase, times_s in phases_s.items()},
        "tokens_per_sec": [tokens / step_s for step_s in seconds],
        "samples_per_sec": [samples / step_s for step_s in seconds],
        "memory_allocated_gb": [gib * GB_PER_GIB for gib in row["iteration_held_gib"]],
        "memory_peak_gb": [gib * GB_PER_GIB for gib in row["iteration_peak_gib"]],
    }
    average_s = statistics.fmean(seconds)
    shares = {f"{phase}_pct": 100 * statistics.fmean(times_s) / average_s for phase, times_s in phases_s.items()}
    summary = {
        "num_steps": count,
        "avg_step_time_ms": 1e3 * average_s,
        "std_step_time_ms": 1e3 * statistics.stdev(seconds) if count > 1 else 0.0,
        "min_step_time_ms": 1e3 * min(seconds),
        "max_step_time_ms": 1e3 * max(seconds),
        "avg_tokens_per_sec": tokens / average_s,
        "avg_samples_per_sec": samples / average_s,
        "avg_loss": statistics.fmean(losses),
        "final_loss": losses[-1],
        "peak_memory_gb": row["peak_gib"] * GB_PER_GIB,
        "timing_breakdown": {**shares, "other_pct": 100 - math.fsum(shares.values())},
    }
    name = f"results_{row['variant']}_tp{row['tp_size']}_dp{row['dp_size']}"
    steps = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return name, {"config": _config(row, job), "steps": steps, "summary": summary}


def _config(row: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in the older benchmark's names and order, and then the job's other fields. A model of
    conf/model has the name of its first id, also if the user typed another one."""
    file = Path(tpbench.__file__).parent / f"conf/model/{job['model']}.yaml"
    model = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    older = {
        "model_name": str(model.get("hub_ids", [job["model"]])[0]),
        "impl": row["variant"],
        **{name: job[name] for name in ("tp_size", "dp_size", "batch_size", "seq_length", "learning_rate", "dtype")},
        "autocast": job["autocast"],
        "num_training_steps": job["warmup_steps"] + job["steps"],
        "warmup_steps": job["warmup_steps"],
        "gradient_accumulation_steps": job["accumulate"],
        "activation_checkpointing": job["activation_checkpointing"],
        "world_size": row["world_size"],
        "dataset_name": "synthetic",
        "dataset_percentage": None,
    }
    return older | {name: value for name, value in job.items() if name not in (*older, "model", "variant")}
