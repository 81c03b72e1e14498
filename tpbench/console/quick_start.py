"""End of `scripts/run` without arguments: what its sweep has shown, and three commands to continue with."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from tpbench.measure import machine
from tpbench.report.analysis.metrics import number
from tpbench.results.read import load

OUTPUTS = "outputs"


def text(rows: pd.DataFrame, scripts: str, gpus: int) -> str:
    """Return what the rows of a sweep show and the commands. `scripts` is the folder of the scripts."""
    lines = [f"  {command}  # {meaning}" for command, meaning in commands(scripts, gpus)]
    return "\n".join(["", *shown(rows), "", "Continue with:", *lines, ""])


def shown(rows: pd.DataFrame) -> list[str]:
    """Return sentences about the rows of the newest sweep."""
    newest = rows[rows["sweep_id"] == rows["sweep_id"].max()]
    right = newest[newest["status"] == "ok"]
    if right.empty:
        return [f"Nothing was measured: {newest['reason'].iloc[-1]}."]
    row = right.iloc[-1]
    ranks = f"{row['world_size']} rank{'s' if row['world_size'] > 1 else ''}"
    sentences = [
        f"Measured: the {row['loss']} loss of {row['tokens']} tokens x {row['vocab']} logits on {ranks}, by "
        f"{len(right)} of {len(newest)} variants.",
        "Loss and gradient of each agree with a float64 reference. A variant that does not agree has no time.",
    ]
    if len(interpreted := right[right["interpreted"]]):
        names = ", ".join(interpreted["variant"])
        sentences.append(f"{names} ran in Triton's interpreter, because there is no GPU: its time is no measurement.")
    if len(measured := right[~right["interpreted"]]):
        best = measured.loc[measured["time_ms"].idxmin()]
        sentences.append(f"The fastest measured variant is {best['variant']}: {number(best['time_ms'])} ms.")
    return sentences


def commands(scripts: str, gpus: int) -> list[tuple[str, str]]:
    """Return three commands that this machine can run, each with its purpose."""
    ranks = max(size for size in (1, 4, 8) if size <= max(gpus, 1))
    sweep = f"{scripts}/run -m variant=triton_tp,pytorch_gather"
    return [
        (f"{scripts}/run list", "all variants, shapes and workloads"),
        (f"{sweep} shape=v131k_tp{ranks}", "a vocabulary of 131072")
        if gpus
        else (f"{sweep} loss=forward_kl,reverse_kl", "two other losses"),
        (f"{scripts}/report.py {OUTPUTS} -o report.html", "a page of all rows"),
    ]


if __name__ == "__main__":
    print(text(load(OUTPUTS), str(Path(sys.argv[1]).parent), machine.gpu_count()), end="")
