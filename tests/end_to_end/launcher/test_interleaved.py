"""Cells that take turns in one torchrun: in the order A B B A, and a fault costs one cell."""

import json
from pathlib import Path

import tpbench as package
from tests.support.command import COMMAND
from tests.support.listening import alone_on_loopback

VARIANTS = """
import os, signal
from dataclasses import replace
from tpbench.workloads.entropy_loss import in_torch

# A cell runs once more, in a folder with a longer name, after a fault of another one.
RUN = 1 + os.readlink("/proc/self/fd/2").count("-again")

def manual(problem, shard):
    return in_torch.prepare_manual(problem, shard)

def faulty(problem, shard, run, fault):
    step, count = in_torch.prepare_manual(problem, shard), 0
    def with_fault():
        nonlocal count
        count += 1
        if count == 4 and RUN == run and os.environ["RANK"] == "1":
            fault()
        return step.run()
    return replace(step, run=with_fault)

def lacks_memory():
    raise MemoryError

def grows(problem, shard):
    return faulty(problem, shard, 1, lacks_memory)

def killed(problem, shard):
    return faulty(problem, shard, 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
"""
"""A user's variants. In the first two runs of the group, rank 1 of one of them fails."""


def test_turns_in_the_order_a_b_b_a_and_a_fault_costs_its_own_cell_only(tmp_path: Path) -> None:
    """Beside other cells a lack of memory means nothing, so such a cell runs once more, as the only one of its line.

    No socket of the sweep listens beyond loopback.
    """
    (tmp_path / "mine.py").write_text(VARIANTS)
    sweep = ("-m", "variant=mine.py:manual,pytorch_gather,mine.py:grows,mine.py:killed", "tokens=256", "vocab=8192",
             "time_budget_s=60", "max_iterations=4", "order=interleaved", "reuse=true", "device=cpu", "tp_size=2",
             "dtype=float32")  # fmt: skip
    code, output = alone_on_loopback([*COMMAND, *sweep], tmp_path)
    assert code == 1, output
    manual, gather, grows, killed = package.load(tmp_path / "outputs").sort_values("cell").to_dict("records")
    assert [row["status"] for row in (manual, gather, grows, killed)] == ["ok"] * 3 + ["error"]
    assert "rank 1 ended with signal 9 (SIGKILL)" in killed["reason"] and killed["interleaved_cells"] == 3
    assert grows["not_interleaved"] == "out of memory beside 3 cells of its problem"
    assert grows["log_dir"].endswith("/2-again")
    assert grows["jobs_before"] == 2  # in the processes of the group, after it
    assert manual["interleaved"] == gather["interleaved"] and manual["interleaved_cells"] == 2
    assert manual["iterations"] == len(manual["samples_ms"]) == len(manual["round_ms"]) == 4
    assert gather["peak_gib"] > 3 * manual["peak_gib"]  # each its own, though both are there at once
    (lines,) = tmp_path.glob("outputs/sweeps/*/group-0-again-again/progress.jsonl")
    turns = "".join("ABC"[value] if isinstance(value, int) else "|" for value in map(json.loads, lines.open()))
    assert turns == "A" + "AB" + "ABBA" * 2 + "AB" + "|" + "AA|"
    assert not [file for name in ("result.json", ".result.*") for file in tmp_path.rglob(name)]
