"""A row as the JSON document that older tools of this kind write: `results_IMPL_tpN_dpN.json`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

PHASES = ("forward", "backward", "optimizer")


def document(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """File name and content of a row that was measured: its job as `config`, every measured step, and a summary. None
    of any other row. Times are device times where there are any; phases are of steps timed apart, in percent of their
    sum."""
    samples = row.get("device_samples_ms")
    samples = row.get("samples_ms") if samples is None else samples
    if row.get("status") != "ok" or samples is None:
        return None
    config = json.loads(row["job"])
    losses, norms = (list(row[name])[-len(samples) :] for name in ("losses", "grad_norms"))
    tokens = config["batch_size"] * config["seq_length"] * config["accumulate"] * row["dp_size"]
    steps = [
        {"step": step, "step_ms": ms, "loss": loss, "grad_norm": norm, "tokens_per_second": 1e3 * tokens / ms}
        for step, (ms, loss, norm) in enumerate(zip(samples, losses, norms, strict=True), start=1)
    ]
    average = statistics.fmean(samples)
    summary: dict[str, Any] = {
        "avg_step_ms": average,
        "std_step_ms": statistics.stdev(samples) if len(samples) > 1 else 0.0,
        "tokens_per_second": 1e3 * tokens / average,
        "tokens_per_second_per_gpu": 1e3 * tokens / average / row["world_size"],
        "samples_per_second": 1e3 * tokens / config["seq_length"] / average,
        "avg_loss": statistics.fmean(losses),
        "final_loss": losses[-1],
        "peak_memory_gib": row["peak_gib"],
        "mfu": row.get("mfu"),
    }
    phases = [row.get(f"{phase}_ms") for phase in PHASES]
    if None not in phases:
        for phase, ms in zip(PHASES, phases, strict=True):
            summary[f"{phase}_pct"] = 100 * float(ms or 0) / sum(float(each or 0) for each in phases)
    name = f"results_{row['variant']}_tp{row['tp_size']}_dp{row['dp_size']}"
    return name, {"implementation": row["variant"], "config": config, "steps": steps, "summary": summary}
