"""JSON documents and the study `agreement`, made from rows of the train step."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml

import tpbench
from tpbench.tables import Table
from tpbench.workloads.train_step.problem import PHASES

GB_PER_GIB = 2**30 / 1e9
PROBLEM = (
    "model", "config_hash", "num_layers", "batch_size", "seq_length", "accumulate", "dp_size", "warmup_steps",
    "batches", "learning_rate", "weight_decay", "max_grad_norm", "seed", "dtype", "autocast",
)  # fmt: skip
"""Columns that identify a problem. Rows that agree in them train on the same tokens with the same updates."""
STEPS = (1, 2, 3, 4, 8, 16)
"""Steps that are shown, besides the last one that rows of a problem share. One process checks the first three."""
_TRAJECTORIES = ("losses", "grad_norms")
"""Columns with one number per step."""

Row: TypeAlias = Mapping[str, Any]


def json_document(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the file name (without ending) and the content for a measured row, or None for any other row.

    The content is the job as `config`, every measured step, and a summary, as an older benchmark of AutoTP and FSDP2
    writes them. Steps count from the first warm-up step, 0. Times are device times if the row has them. GB are 10^9
    bytes. Values that an older row lacks, such as phases of each step, are null.
    """
    samples_ms = row.get("device_samples_ms")
    samples_ms = row.get("samples_ms") if samples_ms is None else samples_ms
    if row.get("status") != "ok" or samples_ms is None:
        return None
    job, count, seconds = json.loads(row["job"]), len(samples_ms), [ms / 1e3 for ms in samples_ms]
    samples = job["batch_size"] * job["accumulate"] * row["dp_size"]
    tokens = samples * job["seq_length"]
    losses = list(row["losses"])[-count:]
    phases_s = {f"{phase}_time_s": _numbers(row, f"step_{phase}_ms", 1e-3, count) for phase in PHASES}
    columns: dict[str, Iterable[Any]] = {
        "step": range(job["warmup_steps"], job["warmup_steps"] + count),
        "loss": losses,
        "step_time_s": seconds,
        **phases_s,
        "tokens_per_sec": [tokens / step_s for step_s in seconds],
        "samples_per_sec": [samples / step_s for step_s in seconds],
        "memory_allocated_gb": _numbers(row, "iteration_held_gib", GB_PER_GIB, count),
        "memory_peak_gb": _numbers(row, "iteration_peak_gib", GB_PER_GIB, count),
    }
    average_s = statistics.fmean(seconds)
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
        "timing_breakdown": _breakdown(row, list(phases_s.values()), average_s),
    }
    name = f"results_{row['variant']}_tp{row['tp_size']}_dp{row['dp_size']}"
    steps = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return name, {"config": _config(row, job), "steps": steps, "summary": summary}


def _config(row: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in the older benchmark's names and order, and then the job's other fields. A model of
    conf/model has the name of its id."""
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


def _numbers(row: Mapping[str, Any], column: str, factor: float, count: int) -> list[float | None]:
    """Return the numbers of a column times a factor, or as many None if the row has none."""
    values = row.get(column)
    return [None] * count if values is None else [factor * value for value in values]


def _breakdown(row: Row, phases_s: Sequence[Sequence[Any]], average_s: float) -> dict[str, float | None]:
    """Return each phase's share of the average step in percent. An older row has only the medians of its phases.

    In older rows each phase is of the rank that was slowest in it. If they add up to more than the step, `other_pct` is
    null.
    """
    shares: dict[str, float | None] = {}
    for phase, times_s in zip(PHASES, phases_s, strict=True):
        median_ms = row.get(f"{phase}_ms")
        phase_s = statistics.fmean(times_s) if None not in times_s else median_ms and median_ms / 1e3
        shares[f"{phase}_pct"] = phase_s and 100 * phase_s / average_s
    rest = None if None in shares.values() else 100 - math.fsum(filter(None, shares.values()))
    return {**shares, "other_pct": None if rest is None or rest < 0 else rest}


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the largest errors of each variant, and the largest differences between equal problems by step."""
    correct = [row for row in rows if row["status"] == "ok"]
    problems: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in correct:
        problems[tuple(row.get(name) for name in PROBLEM)].append(row)
    several = [group for group in problems.values() if len(group) > 1]
    errors = [_errors(correct)] if correct else []
    return [*errors, _differences(several)] if several else errors


def picture(rows: Sequence[Row]) -> None:
    """Return None: the study has no picture."""


def _errors(rows: Iterable[Row]) -> Table:
    checks: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        checks[row["oracle"] or "-", row["variant"]].append(row)
    lines = []
    for check, checked in sorted(checks.items()):
        errors = [[row[name] for row in checked if row[name] is not None] for name in ("loss_error", "grad_error")]
        lines.append((*check, str(len(checked)), *(_percent(max(each)) if each else "-" for each in errors)))
    columns = ("oracle", "variant", "rows", "largest loss_error", "largest grad_error")
    return Table("largest relative errors of losses and gradient norms", columns, lines)


def _differences(problems: Sequence[Sequence[Row]]) -> Table:
    """Return the table of problems that have two rows or more each."""
    shared = {sorted(len(row["losses"]) for row in group)[-2] for group in problems}
    lines = []
    for step in sorted({*(step for step in STEPS if step < max(shared)), *shared}):
        reached = [[row for row in group if len(row["losses"]) >= step] for group in problems]
        compared = [group for group in reached if len(group) > 1]
        largest = []
        for name in _TRAJECTORIES:
            values = [[row[name][step - 1] for row in group] for group in compared]
            largest.append(max((max(group) - min(group)) / max(max(group), 1e-12) for group in values))
        lines.append((str(step), str(len(compared)), str(sum(map(len, compared))), *map(_percent, largest)))
    heading = "largest difference between rows of equal problems, relative to the larger value"
    return Table(heading, ("step", "problems", "rows", *_TRAJECTORIES), lines)


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"
