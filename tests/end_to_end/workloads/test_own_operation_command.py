"""The operation of the page on own operations, with a faulty variant in another file, from a sweep to a report."""

import re
from pathlib import Path

import pytest

import tpbench as package
from tests.support.command import ROOT, tpbench
from tests.support.registered import forget
from tpbench.report.command import main as report
from tpbench.results.schema import workload_columns

PARTS = """
class Parts:
    def __init__(self, step):
        self.step = step

@average.step(Parts)
def step_of(problem, inputs, parts, rank):
    return parts.step

@average.details
def details(problem, inputs, session, rank):
    assert isinstance(session.prepared, Parts) and session.costs.bytes_moved == 8 * inputs["x"].numel()
    return {"copy_ms": session.stopwatch.ms(inputs["x"].clone)}
"""
CHANGES = {
    "    return step\n": "    return Parts(step)\n",
    '"float32": 1e-5}': '"float32": 1e-5}, columns={"copy_ms": "a copy of x alone, ms"}',
}
"""Changes of the page's operation: its variants return an object, and its rows have one more column."""
FAULTY = """\
from average import Parts, average, nccl

@average.variant("wrong in one row of rank 1, from its sixth call on")
def faulty(problem, inputs, rank):
    right, calls = nccl(problem, inputs, rank).step, []
    def step():
        outputs = right()
        calls.append(1)
        if rank.rank == 1 and len(calls) > 5:
            outputs["mean"][2, 3] += 1
        return outputs
    return Parts(step)
"""


def test_a_sweep_and_a_report_without_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "tpbench/docs/own_operation.md").read_text()
    example = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    for before, after in CHANGES.items():
        assert before in example
        example = example.replace(before, after)
    (tmp_path / "average.py").write_text(example + PARTS)
    (tmp_path / "faulty.py").write_text(FAULTY)
    line = ("-m", "variant=average.py:nccl,faulty.py:faulty", "tokens=64", "hidden=32", "tp_size=2", "device=cpu",
            "time_budget_s=20", "min_iterations=3", "max_iterations=4", "order=interleaved", "reuse=true")  # fmt: skip
    done = tpbench(*line, cwd=tmp_path)
    assert done.returncode == 1 and "1 of 2 cells failed (wrong: 1)" in done.stderr, done.stderr
    for file in tmp_path.glob("*.py"):
        file.unlink()
    right, wrong = (rows for _, rows in package.load(tmp_path / "outputs").groupby("variant"))
    assert (list(right["status"]), list(wrong["status"])) == (["ok"], ["wrong"])
    assert set(right["interleaved_cells"]) == {2} and set(right["fresh"]) == {True}
    assert all(right["floor_ms"] > 0) and list(right["bytes_communicated"]) == [64 * 32 * 4]
    assert re.search(r"rank 1: 1 of 2048 elements of mean differ, most at \[2, 3\]: ", wrong["reason"].iloc[0])
    assert all(right["copy_ms"] > 0) and workload_columns()["average"]["copy_ms"].unit == "ms"
    forget()
    assert report([f"{tmp_path}/outputs", "--columns", "hidden,copy_ms,bytes_moved"]) == 0
    shown = capsys.readouterr().out
    assert "average, " in shown and "wrong" in shown and "16384" in shown, shown
