"""Cells that take turns in one torchrun: in the order A B B A, and a fault costs one cell."""

import json
import os
from pathlib import Path

import tpbench as package
from tests.support.command import ROOT, Running, gone, tpbench

INTERLEAVED = ("order=interleaved", "reuse=true", "device=cpu", "tp_size=2", "dtype=float32")

CROWDED = """
import os
from tpbench.workloads.entropy_loss import in_torch
def crowded(problem, shard):
    if os.environ["RANK"] == "1" and "-again/" not in os.readlink("/proc/self/fd/2"):
        raise MemoryError
    return in_torch.prepare_manual(problem, shard)
"""
"""A user's variant of which rank 1 has too little memory as it is set up beside others."""


def test_turns_in_the_order_a_b_b_a_and_a_cell_without_memory_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CROWDED)
    done = tpbench("-m", "variant=pytorch_tp_manual,pytorch_gather,mine.py:crowded", "tokens=512", "vocab=8192",
                   "time_budget_s=60", "max_iterations=4", *INTERLEAVED, cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = package.load(tmp_path / "outputs").set_index("variant")
    assert list(rows["status"]) == ["ok"] * 3
    manual, gather, crowded = (rows.loc[name] for name in ("pytorch_tp_manual", "pytorch_gather", "mine.py:crowded"))
    assert manual["interleaved"] == gather["interleaved"] and manual["interleaved_cells"] == 2
    assert manual["iterations"] == len(manual["samples_ms"]) == len(manual["round_ms"]) == 4
    assert gather["peak_gib"] > 3 * manual["peak_gib"]  # each its own, though both are there at once
    (lines,) = tmp_path.glob("outputs/sweeps/*/group-0-again/progress.jsonl")
    turns = "".join("ABC"[value] if isinstance(value, int) else "|" for value in map(json.loads, lines.open()))
    assert turns == "A" + "AB" + "ABBA" * 2 + "AB" + "|" + "AA" + "|"
    # Beside the others a lack of memory means nothing, so the cell ran once more, as the only one of its line.
    assert crowded["not_interleaved"] == "out of memory beside 2 cells of its problem"
    assert crowded["log_dir"].endswith("/2-again")


IN_ROUND_2 = """
import os, sys, time
count = 0
def hook(event, arguments):
    global count
    if event == "open" and str(arguments[0]).endswith("/2/warm/attempt_0/1/stderr.log"):
        count += 1
        while count == 3:
            open({waiting!r}, "w").close()
            time.sleep(0.05)
sys.addaudithook(hook)
"""
"""Rank 1 stays in the round 2 of cell 2, as it turns to it for the third time."""


def test_a_rank_killed_in_a_round_costs_its_cell_and_the_others_run_again(tmp_path: Path) -> None:
    waiting = tmp_path / "waiting"
    (tmp_path / "sitecustomize.py").write_text(IN_ROUND_2.format(waiting=str(waiting)))
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    variants = "variant=pytorch_tp_manual,pytorch_gather,triton_tp"
    running = Running("-m", variants, "tokens=16", "vocab=512", "time_budget_s=60", "precision=0", "seed=1",
                      "max_iterations=24", *INTERLEAVED, cwd=tmp_path, env=env)  # fmt: skip
    running.until(waiting.exists, "round 2")
    family = running.family()
    next(rank for rank in running.workers() if rank.environ()["RANK"] == "1").kill()
    code, output = running.end()
    assert code == 1, output
    rows = package.load(tmp_path / "outputs").set_index("cell").sort_index()
    assert rows["status"].to_dict() == {0: "ok", 1: "ok", 2: "error"}
    assert "rank 1 ended with signal 9 (SIGKILL)" in rows["reason"][2]
    assert [len(rows["round_ms"][cell]) for cell in (0, 1)] == [24] * 2
    assert list(rows["interleaved_cells"]) == [2, 2, 3]
    assert gone(family)
