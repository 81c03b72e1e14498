"""Synthetic rows of GPUs for tests: not measured."""

from __future__ import annotations

import datetime
from typing import Any

SIZES = {"hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "part": "block", "tp_size": 4}
TRACE = {
    "timeline_start_ms": [0.0, 0.5, 0.6, 3.0],
    "timeline_ms": [0.4, 2.0, 1.0, 0.25],
    "timeline_kind": [2.0, 0.0, 1.0, 2.0],
    "timeline_lane": [0.0, 0.0, 1.0, 0.0],
}


def row(variant: str, number: int, **changes: Any) -> dict[str, Any]:
    moment = datetime.datetime(2026, 11, 21, 12, 0, number, tzinfo=datetime.UTC)
    made = {
        "workload": "tp_block", "variant": variant, "status": "ok", "device": "cuda", "gpu_name": "NVIDIA H200",
        "tokens": 8192, "dp_size": 1, "dtype": "bfloat16", "save_gathered": True, "signals": "stream", "seed": 0,
        "time_ms": 9.0, "device_ms": 8.0 + number, "forward_ms": 3.0, "backward_ms": 5.0, "loss_value": -0.5,
        "grad_norm": 19.25, "exposed_ms": 0.5, "hidden_share": 0.75, "peak_gib": 1.5, "interpreted": False,
        "started_at": moment, "finished_at": moment, **SIZES, **TRACE,
    }  # fmt: skip
    made |= changes
    return made | {"key": f"{variant}-{made['tokens']}-{made['save_gathered']}"}
