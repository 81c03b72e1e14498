"""The study of losses compares sweep by sweep, and says how sure a ratio is."""

from typing import Any

import pytest

from tpbench.workloads.train_step.loss_study import tables


def row(sweep: int, loss: str, time_ms: float, **columns: Any) -> dict[str, Any]:
    return {
        "sweep_id": f"s{sweep}", "train_loss": loss, "time_ms": time_ms, "tokens_per_s_per_gpu": 1e6 / time_ms,
        "model": "tiny", "variant": "fsdp_dtensor", "batch_size": 1, "tp_size": 2, "peak_gib": 10.0, "steady_gib": 2.0,
        "memory_limit_gib": 80.0, **columns,
    }  # fmt: skip


def test_a_loss_is_compared_with_torchs_of_the_same_sweep() -> None:
    """The second sweep is slower as a whole, which leaves the ratios as they are."""
    rows = [row(sweep, "torch", time_ms) for sweep, time_ms in enumerate([100.0, 200.0, 100.0])]
    rows += [
        row(sweep, "tpbench_linear", time_ms, peak_gib=6.0) for sweep, time_ms in enumerate([80.0, 162.0, 79.0, 10.0])
    ]
    rows += [row(0, "torch", 50.0, model="small")]  # this one has nothing to compare
    rows += [row(0, "liger", 100.0), row(3, "liger", 1.0, peak_gib=8.0)]
    (table,) = tables(rows)
    lines = {line[0]: dict(zip(table.columns, line, strict=True)) for line in table.texts}
    assert list(lines) == ["torch", "tpbench_linear", "liger"]
    ours = lines["tpbench_linear"]
    assert ours["of torch's time"] == "0.800x, 0.775 to 0.825"  # t of two degrees of freedom: 4.303
    assert (ours["sweeps"], ours["time_ms"], ours["saved_gib"]) == ("4", "79.5", "4.00")
    assert (lines["torch"]["batch that fits"], ours["batch that fits"]) == ("9", "19")  # (80 - 2) / 8, and / 4
    assert lines["liger"]["batch that fits"] == "9 to 13"
    assert lines["liger"]["of torch's time"] == "1.000x?"  # one sweep with both has no interval
    assert "model=tiny" in table.heading and table.keys == 1


def test_problems_differ_in_more_than_the_loss() -> None:
    for setting in ({"compile": True}, {"learning_rate": 1e-3}, {"batches": 2}):
        assert tables([row(0, "torch", 1.0), row(0, "liger", 1.0, **setting)]) == []
    (table,) = tables([row(0, loss, 1.0, seq_length=size) for size in (512, 64) for loss in ("torch", "liger")])
    assert [line[:2] for line in table.texts] == [
        ["512", "torch"], ["512", "liger"], ["64", "torch"], ["64", "liger"],
    ]  # fmt: skip
    assert table.texts[0][-3:] == pytest.approx(["10.00", "-", "9"])
