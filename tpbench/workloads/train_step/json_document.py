"""Convert a row to the JSON document that older benchmarks of this kind write: `results_IMPL_tpN_dpN.json`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from tpbench.workloads.train_step.phases import PHASES


def json_document(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the file name (without ending) and the content for a measured row, or None for any other row.

    The content is the job as `config`, every measured step, and a summary. Times are device times if the row has them.
    Phases, which are timed in separate steps, are percentages of their sum.
    """
    samples_ms = row.get("device_samples_ms")
    samples_ms = row.get("samples_ms") if samples_ms is None else samples_ms
    if row.get("status") != "ok" or samples_ms is None:
        return None
    config = json.loads(row["job"])
    losses, norms = (list(row[name])[-len(samples_ms) :] for name in ("losses", "grad_norms"))
    tokens = config["batch_size"] * config["seq_length"] * config["accumulate"] * row["dp_size"]
    steps = [
        {"step": step, "step_ms": ms, "loss": loss, "grad_norm": norm, "tokens_per_second": 1e3 * tokens / ms}
        for step, (ms, loss, norm) in enumerate(zip(samples_ms, losses, norms, strict=True), start=1)
    ]
    average_ms = statistics.fmean(samples_ms)
    summary: dict[str, Any] = {
        "avg_step_ms": average_ms,
        "std_step_ms": statistics.stdev(samples_ms) if len(samples_ms) > 1 else 0.0,
        "tokens_per_second": 1e3 * tokens / average_ms,
        "tokens_per_second_per_gpu": 1e3 * tokens / average_ms / row["world_size"],
        "samples_per_second": 1e3 * tokens / config["seq_length"] / average_ms,
        "avg_loss": statistics.fmean(losses),
        "final_loss": losses[-1],
        "peak_memory_gib": row["peak_gib"],
        "mfu": row.get("mfu"),
    }
    phases_ms = [row.get(f"{phase}_ms") for phase in PHASES]
    if None not in phases_ms:
        for phase, ms in zip(PHASES, phases_ms, strict=True):
            summary[f"{phase}_pct"] = 100 * float(ms or 0) / sum(float(each or 0) for each in phases_ms)
    name = f"results_{row['variant']}_tp{row['tp_size']}_dp{row['dp_size']}"
    return name, {"implementation": row["variant"], "config": config, "steps": steps, "summary": summary}
