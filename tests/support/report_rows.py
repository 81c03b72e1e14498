"""A few synthetic rows of every kind that a report treats in its own way."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support import synthetic

CODE = {"tpbench_version": "1.2.3", "kernels_version": "1111aaaa2222", "git_commit": "0a1b2c3d4e5f", "git_dirty": False}
H100 = {"gpu_name": "NVIDIA H100", "driver_version": "590.2", "host": "other"}
CPU = {"device": "cpu", "gpu_name": None, "device_ms": None, "device_samples_ms": None}
ROUNDS = np.linspace(0.02, 0.03, 16)


def cell(*problem: Any, **changes: Any) -> dict[str, Any]:
    return synthetic.cell(*problem, **{**CODE, **changes})


def of_every_kind() -> list[dict[str, Any]]:
    """Return rows of some problems of three losses, of another machine, and of a CPU."""
    together = {"interleaved": "triton_tp,pytorch_tp_manual"}
    times = {"round_ms": ROUNDS, "device_round_ms": ROUNDS * 1.1}
    slower = {"round_ms": ROUNDS * 1.3 + np.sin(np.arange(16)) / 1000, "device_round_ms": ROUNDS * 1.2}
    return [
        cell("triton_tp", 32768, 2, **together, **times, warm=True),
        cell("pytorch_tp_manual", 32768, 2, **together, **slower),
        cell("pytorch_gather", 32768, 2, host="other", kernels_version="0123456789abcdef", git_commit="f" * 40),
        cell("triton_tp", 65536, 4, bound="host", throttle_reasons="sw_thermal_slowdown", beside="job 7"),
        cell("triton_tp", 65536, 4, block_cap=8192, factor=1.01, peak_gib=0.0004),
        cell("pytorch_tp_manual", 65536, 4, status="oom", reason="rank 0 ran out of memory", oom_bytes=2**30),
        cell("pytorch_gather", 65536, 4, loss_value=12.5, samples_ms=[0.5, 0.6, 0.7], device_samples_ms=None),
        cell("triton_tp", 131072, 4, status="wrong", reason="grad_error 0.5 is above 0.02", loss_error=0.5),
        cell("pytorch_tp_manual", 131072, 4, status="skipped", reason="needs 8 GPUs, found 4"),
        cell("pytorch_gather", 131072, 4, status="timeout", reason=None, log_dir="outputs/sweeps/a/7"),
        cell("triton_tp", 131072, 8, warmed_up=False),
        cell("triton_tp", 131072, 1, loss="reverse_kl", temperature=2.0),
        cell("pytorch_gather", 131072, 1, loss="reverse_kl", temperature=2.0, factor=0.999, device_ms=None),
        *(cell("triton_tp", vocab, 1, loss="forward_kl") for vocab in (32768, 65536)),
        *(cell("pytorch_gather", vocab, 1, loss="forward_kl", factor=0.2) for vocab in (32768, 65536)),
        cell("triton_tp", 32768, 2, **H100),
        cell("pytorch_gather", 32768, 2, **H100, factor=0.02),
        cell("triton_tp", 512, 2, **CPU, interpreted=True),
        cell("pytorch_gather", 512, 2, **CPU, floor_ms=None),
        cell("pytorch_tp_manual", 512, 2, **CPU, reason="noise"),
    ]


def sides() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return two sets of rows whose cells have every verdict of a comparison."""
    before = [
        *(cell("triton_tp", 32768, 4, run=f"before{at}") for at in range(3)),
        cell("triton_tp", 65536, 4, warm=True), cell("triton_tp", 131072, 4), cell("triton_tp", 32768, 1),
        cell("triton_tp", 65536, 1, status="oom", reason="no room"), cell("triton_tp", 131072, 1),
        cell("pytorch_gather", 32768, 1, status="error", reason="x"), cell("pytorch_gather", 65536, 1, beside="job 7"),
        cell("pytorch_gather", 131072, 1, samples_ms=[0.4, 0.5]), cell("pytorch_gather", 32768, 2),
        cell("pytorch_gather", 32768, 4, warmed_up=False), cell("pytorch_gather", 65536, 4),
        cell("pytorch_gather", 131072, 4, time_ms=None), cell("pytorch_tp_manual", 32768, 1, sm_clock_mhz=1980.0),
    ]  # fmt: skip
    after = [
        *(cell("triton_tp", 32768, 4, run=f"after{at}", factor=1.4 + at / 50) for at in range(3)),
        cell("triton_tp", 65536, 4, run="b", factor=0.5, git_commit="9" * 40, git_dirty=True),
        cell("triton_tp", 131072, 4, run="b", bound="host", kernels_version="33334444", sm_clock_mhz=1960.0),
        cell("triton_tp", 32768, 1, status="error", reason="a rank died"), cell("triton_tp", 65536, 1),
        cell("triton_tp", 131072, 1, driver_version="590.2"),
        cell("pytorch_gather", 32768, 1, status="error", reason="x"), cell("pytorch_gather", 65536, 1),
        cell("pytorch_gather", 131072, 1, samples_ms=[0.9, 0.8], time_ms=0.85), cell("pytorch_gather", 65536, 2),
        cell("pytorch_gather", 32768, 4), cell("pytorch_gather", 65536, 4, status="skipped", reason="no GPU"),
        cell("pytorch_gather", 131072, 4), cell("pytorch_tp_manual", 32768, 1, sm_clock_mhz=1500.0, factor=1.04),
    ]  # fmt: skip
    return before, after


def history() -> list[dict[str, Any]]:
    """Return rows of three cells in time order: one changes twice, one fails at last, one stays."""
    rows = []
    for at in range(15):
        code = {"git_commit": f"{at // 5}" * 40, "torch_version": f"2.{11 + at // 10}.0", "git_dirty": at == 14}
        rows.append(cell("triton_tp", 32768, 2, run=f"{at}", factor=(1.0, 1.5, 0.8)[at // 5], **code))
        rows.append(cell("pytorch_gather", 32768, 2, run=f"{at}", **code))
        if at < 4:
            status = {"status": "timeout", "reason": "took 60 s", "torch_version": "2.99.0"} if at == 3 else {}
            rows.append(cell("pytorch_tp_manual", 32768, 2, run=f"{at}", **{**code, **status}))
    return rows
