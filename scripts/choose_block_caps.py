#!/usr/bin/env python3
"""Print the choices of block_cap=auto, tpbench/kernels/block_caps.json, from rows of -m +experiment=block_cap_sweep.

scripts/choose_block_caps.py ROWS... > block_caps.json

For each kind of GPU, algorithm, loss and width it chooses the smallest cap within 0.5% of the fastest.
"""

import argparse
import json
import sys

import _checkout  # noqa: F401  finds the package below

from tpbench.report.command_line import read_rows
from tpbench.settings import JobError

MACHINE = ["torch_version", "triton_version", "tokens", "dtype"]
"""Columns in which all rows of a GPU must agree: times of other software and sizes are not comparable."""


def main() -> int:
    """Run the command. Return 0, or 2 if no block cap can be chosen from the rows."""
    parser = argparse.ArgumentParser(prog="choose_block_caps.py", description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="+", help="folders, files or globs of rows")
    asked = parser.parse_args()
    try:
        rows = read_rows(asked.rows)
    except JobError as error:
        parser.error(str(error))
    rows = rows[(rows["variant"] == "triton_tp") & (rows["status"] == "ok") & rows["device_ms"].notna()]
    rows = rows[~rows["block_cap"].isin([None, "auto"]) & ~rows["algorithm"].isin([None, "auto"])]
    if rows.empty:
        print(
            "choose_block_caps.py: no rows of triton_tp with an algorithm and a block_cap of their own", file=sys.stderr
        )
        return 2
    rows = rows.assign(columns=-(-rows["vocab"] // rows["tp_size"]), block_cap=rows["block_cap"].astype(int))
    machines = []
    for gpu_name, measured in rows.groupby("gpu_name", sort=True):
        differing = [name for name in MACHINE if measured[name].nunique(dropna=False) > 1]
        if differing:
            print(f"choose_block_caps.py: rows of {gpu_name} differ in {', '.join(differing)}", file=sys.stderr)
            return 2
        caps: dict[str, dict[str, dict[str, int]]] = {}
        measured = measured.drop_duplicates(["algorithm", "loss", "columns", "block_cap"], keep="last")
        for (algorithm, loss, columns), tried in measured.groupby(["algorithm", "loss", "columns"]):
            near = tried[tried["device_ms"] <= 1.005 * tried["device_ms"].min()]
            caps.setdefault(str(algorithm), {}).setdefault(str(loss), {})[str(columns)] = int(near["block_cap"].min())
        facts = {"gpu_name": gpu_name, **{name: measured[name].tolist()[0] for name in MACHINE}}
        machines.append({"measured_on": facts, "caps": caps})
    print(json.dumps(machines, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
