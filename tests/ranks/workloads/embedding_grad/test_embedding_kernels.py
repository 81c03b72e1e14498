"""Kernels alone: sums by hand, blocks of any size; and compiled for a GPU, which needs no GPU.

The compiler is stricter than the interpreter. The machine code must also have whole vectors: without them the kernels
are correct, but many times slower.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tpbench.workloads.embedding_grad.exchanges.row_kernels import MERGE_BLOCKS, merge_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).resolve().parents[4]
PROBE = """
import json, re, runpy, sys
import triton

root, asked = sys.argv[1:]
sys.path.insert(0, root)
runpy.run_path(root + "/tpbench/workloads/embedding_grad/exchanges/row_kernels.py")
others = [name for name in sys.modules if name.startswith("tpbench.") and not name.startswith("tpbench.kernels")]

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tpbench.workloads.embedding_grad.exchanges import row_kernels

def stores(kernel, types, constants):
    function = getattr(row_kernels, kernel)
    place = {name: (number,) for number, name in enumerate(function.arg_names)}
    aligned = [name for name in types if types[name][0] == "*" or name in ("rows_per_rank", "width")]
    source = ASTSource(
        function,
        types | dict.fromkeys(constants, "constexpr"),
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return sorted(set(re.findall(r"st\\.global\\S*", code)))

print(json.dumps({"others": others, "stores": [stores(*each) for each in json.loads(asked)]}))
"""
SIZES = {"rows_per_rank": "i32", "width": "i32", "epoch": "*i32"}
PUSH = {
    "grad": "*bf16",
    **dict.fromkeys(("rows", "count", "misplaced"), "*i32"),
    **dict.fromkeys(("inboxes", "marks"), "*i64"),
}
MERGE = {"own": "*bf16", "values": "*bf16", "table": "*i32", "scale": "fp32"}
ADDRESSES = {"values": "*i64", "table": "*i64"}
SEARCH = {
    **dict.fromkeys(("tokens", "stamps", "epoch", "lists", "counts", "misplaced"), "*i32"),
    **dict.fromkeys(("count", "table_rows", "rows_per_list", "capacity"), "i32"),
}
RANKS = {"RANK": 1, "RANKS": 4, "ROWS": 16, "COLUMNS": 256}


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """Import and compile the kernels in a process of their own, without the interpreter."""
    merges = [
        ["_merge_kernel", MERGE | types | SIZES, RANKS | {"BLOCK": 64, "INBOXES": inboxes}]
        for types, inboxes in (({}, 0), (ADDRESSES, 2))
    ]
    push = ["_push_kernel", PUSH | SIZES, RANKS | {"INBOXES": 2}]
    search = ["_search_kernel", SEARCH, {"LISTS": 4, "BLOCK": 1024}]
    asked = json.dumps([push, *merges, search])
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", PROBE, str(ROOT), asked]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_rows_are_stored_in_whole_vectors(compiled: dict[str, Any]) -> None:
    rows, marks = "st.global.v4.b32", "st.global.b32"
    assert compiled["stores"] == [[marks, rows], [rows], [rows], [marks]]


def test_kernels_need_only_the_other_kernels_of_this_package(compiled: dict[str, Any]) -> None:
    assert compiled["others"] == []


@pytest.mark.parametrize("blocks", [MERGE_BLOCKS, (16, 4, 16)])
@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), (3, 0), (5, 2)])
def test_each_row_is_summed_over_ranks(ranks: int, rank: int, blocks: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    rows_per_rank, width = 50, 37
    own = torch.zeros(rows_per_rank, width)
    table = torch.full((ranks, rows_per_rank), -1, dtype=torch.int32)
    received, expected = [torch.randn(3, width)], own.double()  # the first 3 received rows are of no rank
    for source in range(ranks):
        touched = (torch.rand(rows_per_rank) < 0.3).nonzero()[:, 0]
        values, start = torch.randn(len(touched), width), sum(map(len, received))
        expected[touched] += values.double()
        table[source, touched] = torch.arange(start, start + len(touched), dtype=torch.int32)
        if source == rank:
            own[touched] = values
        else:
            received.append(values)
    merged = own.to(DEVICE)
    merge_rows(merged, torch.cat(received).to(DEVICE), table.to(DEVICE), rank=rank, scale=1 / ranks, blocks=blocks)
    torch.testing.assert_close(merged.cpu().double(), expected / ranks, rtol=1e-6, atol=1e-6)
