"""Kernels alone: gathers, sums by hand, blocks of any size; and compiled for a GPU, which needs no GPU.

The compiler is stricter than the interpreter. The machine code must also have whole vectors: without them the kernels
are correct, but many times slower.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpbench.workloads.embedding_grad.row_operations import merge_kernel
from tpbench.workloads.embedding_grad.row_operations.merge_kernel import Blocks, merge_rows, place_rows
from tpbench.workloads.embedding_grad.row_operations.row_kernels import BLOCKS, gather_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).resolve().parents[4]
PROBE = """
import json, pathlib, re, runpy, sys
import triton

root, asked = sys.argv[1:]
sys.path.insert(0, root)
for file in sorted(pathlib.Path(root, "tpbench/workloads/embedding_grad/row_operations").glob("*_kernel*.py")):
    runpy.run_path(str(file))
others = [name for name in sys.modules if name.startswith("tpbench.") and not name.startswith("tpbench.kernels")]

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tpbench.workloads.embedding_grad.row_operations import merge_kernel, row_kernels

def stores(kernel, types, constants):
    function = getattr(row_kernels, kernel, None) or getattr(merge_kernel, kernel)
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
    "length": "i32",
    **dict.fromkeys(("rows", "count", "misplaced"), "*i32"),
    **dict.fromkeys(("inboxes", "marks"), "*i64"),
}
MERGE = {"own": "*bf16", "values": "*bf16", "table": "*i32", "scale": "fp32"}
ADDRESSES = {"values": "*i64", "table": "*i64"}
SEARCH = {
    **dict.fromkeys(("tokens", "stamps", "epoch", "lists", "counts", "misplaced"), "*i32"),
    **dict.fromkeys(("count", "table_rows", "rows_per_list", "capacity"), "i32"),
}
GATHER = {"table": "*bf16", "rows": "*i32", "output": "*bf16", "count": "i32", "table_rows": "i32", "width": "i32"}
RANKS = {"RANK": 1, "RANKS": 4, "ROWS": 16, "COLUMNS": 256}


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """Import and compile the kernels in a process of their own, without the interpreter."""
    merges = [
        ["_merge_kernel", MERGE | types | SIZES, RANKS | {"BLOCK": 64, "INBOXES": inboxes}]
        for types, inboxes in (({}, 0), (ADDRESSES, 2))
    ]
    gather = ["_gather_kernel", GATHER, {"ROWS": 16, "COLUMNS": 256}]
    pushes = [["_push_kernel", PUSH | SIZES, RANKS | {"INBOXES": 2, "COUNTED": counted}] for counted in (False, True)]
    search = ["_search_kernel", SEARCH, {"LISTS": 4, "BLOCK": 1024}]
    asked = json.dumps([*pushes, *merges, gather, search])
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", PROBE, str(ROOT), asked]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_rows_are_stored_in_whole_vectors(compiled: dict[str, Any]) -> None:
    rows, marks = "st.global.v4.b32", "st.global.b32"
    assert compiled["stores"] == [[marks, rows], [marks, rows], [rows], [rows], [rows], [marks]]


def test_kernels_need_only_the_other_kernels_of_this_package(compiled: dict[str, Any]) -> None:
    assert compiled["others"] == []


@settings(max_examples=25, deadline=None)
@given(
    table_rows=st.integers(1, 70),
    width=st.integers(1, 40),
    ids=st.sampled_from((torch.int32, torch.int64)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    blocks=st.sampled_from((BLOCKS, (4, 16))),
    data=st.data(),
)
def test_the_given_rows_are_copied(
    table_rows: int, width: int, ids: torch.dtype, dtype: torch.dtype, blocks: tuple[int, int], data: st.DataObject
) -> None:
    rows = torch.tensor(data.draw(st.lists(st.integers(0, table_rows - 1), max_size=100)), dtype=ids)
    table = torch.randn(table_rows, width).to(dtype)
    output = torch.full((len(rows) + 1, width), 7.0, dtype=dtype, device=DEVICE)
    gather_rows(table.to(DEVICE), rows.to(DEVICE), output[:-1], blocks=blocks)
    assert torch.equal(output[:-1].cpu(), table[rows.long()])
    assert (output[-1] == 7).all()  # nothing is written after the last row


@pytest.mark.parametrize("row", [-1, 3, 2**31 - 1])
def test_a_row_outside_the_table_is_zero(row: int) -> None:
    table, rows = torch.ones(3, 5, device=DEVICE), torch.tensor([1, row], dtype=torch.int32, device=DEVICE)
    assert gather_rows(table, rows, table.new_empty(2, 5)).tolist() == [[1.0] * 5, [0.0] * 5]


@pytest.mark.parametrize("blocks", [merge_kernel.BLOCKS, Blocks(16, 4, 16)])
@pytest.mark.parametrize(("ranks", "rank", "ids"), [(2, 1, torch.int32), (3, 0, torch.int64), (5, 2, torch.int32)])
def test_each_row_is_summed_over_ranks(ranks: int, rank: int, ids: torch.dtype, blocks: Blocks) -> None:
    torch.manual_seed(0)
    rows_per_rank, width, first_row = 50, 37, 700
    held = [(torch.rand(rows_per_rank) < 0.3).nonzero()[:, 0] for _ in range(ranks)]
    own = torch.zeros(rows_per_rank, width)
    own[held[rank]] = torch.randn(len(held[rank]), width)
    counts = [0 if source == rank else len(touched) for source, touched in enumerate(held)]
    starts = [3 + sum(counts[:source]) for source in range(ranks)]  # the first 3 received rows belong to no segment
    received = torch.randn(3 + sum(counts), width)
    rows = torch.full((len(received),), first_row, dtype=ids)
    expected = own.double()
    for touched, start, count in zip(held, starts, counts, strict=True):
        if count:
            rows[start : start + count] = touched + first_row
            expected[touched] += received[start : start + count].double()
    table = torch.empty(ranks, rows_per_rank, dtype=torch.int32, device=DEVICE)
    misplaced = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    merged, own_rows, segments = own.to(DEVICE), held[rank].to(ids) + first_row, list(zip(starts, counts, strict=True))
    own_rows, rows = own_rows.to(DEVICE), rows.to(DEVICE)
    place_rows(own_rows, rows, segments, rank=rank, first_row=first_row, table=table, misplaced=misplaced)
    merge_rows(merged, received.to(DEVICE), table, rank=rank, scale=1 / ranks, blocks=blocks)
    torch.testing.assert_close(merged.cpu().double(), expected / ranks, rtol=1e-6, atol=1e-6)
    assert int(misplaced) == 0
