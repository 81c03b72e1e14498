"""Conclusions about the block, drawn from the committed rows."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import pytest

from tests.support.command import ROOT
from tpbench.results.read import load, plain_rows

CLOCKS = ("time", "device")
PROBLEM = ("hidden", "tokens", "tp_size", "graph", "sweep_id")


@functools.cache
def measured() -> list[dict[str, Any]]:
    folders = [str(ROOT / "outputs" / name) for name in ("reference", "options")]
    return plain_rows(load(folders, workload="tp_block", status="ok", part="block", save_gathered=True))


def beside_each_other(variants: set[str], layers: int) -> dict[tuple[Any, ...], dict[str, dict[str, Any]]]:
    """The rows of one block or of stacks by problem and sweep, where all these variants were measured."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in measured():
        if (row["layers"] or 0) == layers and row["variant"] in variants:
            found[tuple(row[name] for name in PROBLEM)][row["variant"]] = row
    return {problem: rows for problem, rows in found.items() if rows.keys() == variants}


def test_block_auto_loses_to_the_plain_block_by_no_clock() -> None:
    """At most by 1%, as far as the 95% intervals of the medians tell. Older rows of block_auto compared one clock."""
    pairs = beside_each_other({"block_tp", "block_auto"}, layers=0)
    pairs = {problem: rows for problem, rows in pairs.items() if rows["block_auto"]["try_graphs"]}
    assert {problem[:2] for problem in pairs} >= {(4096, tokens) for tokens in (128, 512, 2048, 8192)}
    for problem, rows in pairs.items():
        for clock in CLOCKS:
            chosen, plain = rows["block_auto"][f"{clock}_ci_low_ms"], rows["block_tp"][f"{clock}_ci_high_ms"]
            assert chosen <= 1.01 * plain, (problem, clock)


def test_stacks_train_alike_and_overlap_is_faster_with_a_graph() -> None:
    """The study `profile` has equal losses and norms, half the memory with two ranks, and less time with overlap."""
    stacks = beside_each_other({"block_no_tp", "block_tp", "block_copy_engine"}, layers=2)
    assert {problem[3] for problem in stacks} == {False, True}
    for (_, _, ranks, graph, _), rows in stacks.items():
        alone, plain, overlapped = (rows[name] for name in ("block_no_tp", "block_tp", "block_copy_engine"))
        for row in (plain, overlapped):
            for name in ("losses", "grad_norms"):
                assert list(row[name]) == pytest.approx(list(alone[name]), rel=0.02)
            assert list(row["losses"]) == sorted(row["losses"], reverse=True), "every step lowers the loss"
            assert row["peak_gib"] < 0.6 * alone["peak_gib"] and ranks == 2
        if graph:
            assert overlapped["time_ms"] < plain["time_ms"] < alone["time_ms"]
