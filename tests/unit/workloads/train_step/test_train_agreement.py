"""The study of how far correct rows are from one process and from each other."""

from __future__ import annotations

from typing import Any

from tpbench.workloads.train_step.documents import tables


def row(variant: str, losses: list[float], norms: list[float], **changes: Any) -> dict[str, Any]:
    """Return a correct row of a small problem."""
    return {
        "variant": variant, "status": "ok", "model": "qwen3_8b", "dp_size": 2, "oracle": "3 steps by one process",
        "losses": losses, "grad_norms": norms, "loss_error": 2e-4, "grad_error": 0.01, **changes,
    }  # fmt: skip


def test_the_largest_errors_of_each_variant_by_check() -> None:
    first, second = row("ddp", [2.0], [1.0]), row("ddp", [2.0], [1.0], loss_error=5.7e-4, grad_error=0.002)
    forward = row("fsdp", [2.0], [1.0], oracle="loss of the first step by a forward pass", grad_error=None)
    errors, *_ = tables([second, first, forward, row("fsdp", [9.0], [9.0], status="wrong", loss_error=1.0)])
    assert errors.rows == (
        ("3 steps by one process", "ddp", "2", "0.057%", "1%"),
        ("loss of the first step by a forward pass", "fsdp", "1", "0.02%", "-"),
    )


def test_differences_by_step_are_of_equal_problems_only() -> None:
    rows = [
        row("autotp", [10.0, 9.0, 8.0, 7.0, 6.0], [4.0, 2.0, 1.0, 1.0, 1.0]),
        row("fsdp", [10.0, 9.9, 8.0, 7.0, 5.4], [4.0, 2.0, 1.0, 4.0, 2.0]),
        row("ddp", [20.0, 20.0, 20.0, 20.0, 20.0], [9.0] * 5, dp_size=4),
    ]
    *_, differences = tables(rows)
    assert differences.columns == ("step", "problems", "rows", "losses", "grad_norms")
    assert differences.rows == (
        ("1", "1", "2", "0%", "0%"),
        ("2", "1", "2", "9.1%", "0%"),
        ("3", "1", "2", "0%", "0%"),
        ("4", "1", "2", "0%", "75%"),
        ("5", "1", "2", "10%", "50%"),
    )


def test_a_step_that_only_one_row_reached_is_not_compared() -> None:
    *_, differences = tables([row("autotp", [10.0, 9.0], [4.0, 2.0]), row("fsdp", [10.0], [4.0])])
    assert [line[0] for line in differences.rows] == ["1"]


def test_the_last_step_that_two_rows_share_is_shown() -> None:
    lengths = (7, 5, 5, 5)
    *_, differences = tables([row(f"variant_{number}", [2.0] * n, [1.0] * n) for number, n in enumerate(lengths)])
    assert [line[:3] for line in differences.rows][-1] == ("5", "1", "4")


def test_rows_without_an_equal_have_errors_only() -> None:
    (errors,) = tables([row("autotp", [10.0], [4.0])])
    assert errors.columns[0] == "oracle" and tables([row("autotp", [10.0], [4.0], status="wrong")]) == []
