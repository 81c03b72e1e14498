"""The kernels compiled for a GPU, which needs none: what the interpreter lets pass, and whole vectors in the machine
code, without which they are many times slower and still right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
PROBE = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tpbench.workloads.embedding_grad import gather_kernel, merge_kernel, push_kernel

def stores(kernel, types, constants):
    function = getattr(globals()[kernel[1:]], kernel)
    place = {name: (number,) for number, name in enumerate(function.arg_names)}
    aligned = [name for name in types if types[name][0] == "*" or name in ("rows_each", "width")]
    source = ASTSource(
        function,
        types | dict.fromkeys(constants, "constexpr"),
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return sorted(set(re.findall(r"st\\.global\\S*", code)))

print(json.dumps([stores(*each) for each in json.loads(sys.argv[1])]))
"""
SIZES = {"rows_each": "i32", "width": "i32", "epoch": "i32"}
PUSH = {"grad": "*bf16", "rows": "*i32", "count": "i32", "inboxes": "*i64", "marks": "*i64", "misplaced": "*i32"}
MERGE = {"own": "*bf16", "values": "*bf16", "table": "*i32", "scale": "fp32"}
GATHER = {"table": "*bf16", "rows": "*i32", "output": "*bf16", "count": "i32", "table_rows": "i32", "width": "i32"}
RANKS = {"RANK": 1, "RANKS": 4, "ROWS": 16, "COLUMNS": 256}


def test_rows_are_stored_in_whole_vectors() -> None:
    merges = [["_merge_kernel", MERGE | SIZES, RANKS | {"BLOCK": 64, "PLACES": places}] for places in (True, False)]
    gather = ["_gather_kernel", GATHER, {"ROWS": 16, "COLUMNS": 256}]
    asked = json.dumps([["_push_kernel", PUSH | SIZES, RANKS], *merges, gather])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROBE, asked], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows, marks = "st.global.v4.b32", "st.global.b32"
    assert json.loads(done.stdout) == [[marks, rows], [rows], [rows], [rows]]
