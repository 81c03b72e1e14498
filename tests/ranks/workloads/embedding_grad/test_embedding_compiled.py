"""Kernels compiled for a GPU, which needs no GPU: the compiler is stricter than the interpreter.

The machine code must also have whole vectors. Without them the kernels are correct, but many times slower.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[4]
PROBE = """
import json, pathlib, re, runpy, sys
import triton

root, asked = sys.argv[1:]
sys.path.insert(0, root)
for file in sorted(pathlib.Path(root, "tpbench/workloads/embedding_grad/row_operations").glob("*_kernel.py")):
    runpy.run_path(str(file))
others = [name for name in sys.modules if name.startswith("tpbench.") and not name.startswith("tpbench.kernels")]

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tpbench.workloads.embedding_grad.row_operations import gather_kernel, merge_kernel, push_kernel, search_kernel

def stores(kernel, types, constants):
    function = getattr(globals()[kernel[1:]], kernel)
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
