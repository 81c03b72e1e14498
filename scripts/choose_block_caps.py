#!/usr/bin/env python3
"""Print the choices of block_cap=auto, tpbench/kernels/block_caps.json, from rows of -m +experiment=block_cap_sweep.

scripts/choose_block_caps.py ROWS... > block_caps.json
"""

import argparse
import json
import sys

import _checkout  # noqa: F401  finds the package below

from tpbench.report.command_line import read_rows

MACHINE = ["gpu_name", "torch_version", "triton_version", "tokens", "dtype"]
"""Columns in which all rows must agree: times of other machines and sizes are not comparable."""


def main() -> int:
    """Run the command. Return 0, or 2 if no block cap can be chosen from the rows."""
    parser = argparse.ArgumentParser(prog="choose_block_caps.py", description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="+", help="folders, files or globs of rows, of one kind of machine")
    asked = parser.parse_args()
    rows = read_rows(asked.rows)
    rows = rows[(rows["variant"] == "triton_tp") & (rows["status"] == "ok") & rows["device_ms"].notna()]
    rows = rows[~rows["block_cap"].isin([None, "auto"]) & ~rows["algorithm"].isin([None, "auto"])]
    differing = [name for name in MACHINE if rows[name].nunique(dropna=False) > 1]
    if rows.empty or differing:
        reason = "no measured rows of triton_tp with an algorithm and a block_cap of their own"
        if differing:
            reason = f"rows of several machines or sizes: they differ in {', '.join(differing)}"
        print(f"choose_block_caps.py: {reason}", file=sys.stderr)
        return 2
    rows = rows.assign(columns=-(-rows["vocab"] // rows["tp_size"]), block_cap=rows["block_cap"].astype(int))
    place = ["algorithm", "loss", "columns"]
    rows = rows.drop_duplicates([*place, "block_cap"], keep="last").sort_values(["device_ms", "block_cap"])
    entries = []
    for key, tried in rows.groupby(place):
        best = tried.iloc[0]
        entry = {
            **dict(zip(place, key, strict=True)),
            "block_cap": int(best["block_cap"]),
            "device_ms": round(float(best["device_ms"]), 4),
            "tried": sorted(tried["block_cap"].tolist()),
            "source": ", ".join(asked.rows),
        }
        entries.append(f"    {json.dumps(entry)}")
    measured_on = {name: rows[name].tolist()[0] for name in MACHINE}
    print('{\n  "measured_on": ' + json.dumps(measured_on) + ',\n  "winners": [\n' + ",\n".join(entries) + "\n  ]\n}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
