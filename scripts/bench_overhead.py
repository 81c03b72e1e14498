#!/usr/bin/env python3
"""Measure the seconds that a cell costs above its measurement, in several ways of running it.

The ways are a torchrun for each cell (cold) and a reused torchrun (warm). A bare torchrun of an empty worker is the
baseline.

scripts/bench_overhead.py [--rounds 4] [--cells 2] [--tp-size 2] [--device cpu] [--ways cold warm]

The ways alternate in each round, because the speed of a shared machine drifts. A ratio is the median of the rounds'
ratios. The second number is the time of the whole sweep divided by its cells. It contains the start of Python and
Hydra, the composition of all cells and the printing of the table.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _checkout  # finds the package below

import tpbench

EMPTY = """
import os, torch, torch.distributed as dist
cuda = os.environ["DEVICE"] == "cuda"
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if cuda else "gloo")
dist.all_reduce(torch.ones(1, device="cuda" if cuda else "cpu"))
dist.barrier()
os._exit(0)
"""


def bare(cells: int, ranks: int, device: str, folder: Path) -> list[float]:
    """Return the seconds of each torchrun whose worker only joins its process group."""
    folder.mkdir()
    worker = folder / "empty.py"
    worker.write_text(EMPTY)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
            "--monitor-interval=0.1", str(worker)]  # fmt: skip
    env = {**os.environ, "DEVICE": device, "OMP_NUM_THREADS": "1"}
    spent = []
    for _ in range(cells):
        began = time.perf_counter()
        done = subprocess.run(line, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"bare torchrun ended with {done.returncode}:\n{done.stderr}")
        spent.append(time.perf_counter() - began)
    return spent


def sweep(cells: int, ranks: int, device: str, folder: Path, *more: str) -> tuple[list[float], float]:
    """Return the seconds between the ends of successive rows, and the seconds of the whole sweep for each of its cells.

    The sweep has one cell more than `cells`, because the start of Hydra counts to the first one. A cell measures three
    iterations of a tiny problem, so its time is overhead.
    """
    folder.mkdir()
    line = [sys.executable, "-m", "tpbench", "-m", f"seed={','.join(map(str, range(cells + 1)))}",
            "variant=pytorch_tp_manual", "tokens=16", "vocab=64", f"tp_size={ranks}", f"device={device}",
            "measure=quick", "min_iterations=3", "max_iterations=3", *more]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(_checkout.ROOT), os.environ.get("PYTHONPATH")]))
    began = time.perf_counter()
    done = subprocess.run(line, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, cwd=folder)
    spent = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{' '.join(line[1:])} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    rows = tpbench.load(folder / "outputs")
    assert set(rows["status"]) == {"ok"}
    ended = rows["finished_at"].sort_values()
    return [float(each) for each in ended.diff().dt.total_seconds().dropna()], spent / (cells + 1)


WAYS = {
    "cold": ("tpbench, cold", ()),
    "warm": ("tpbench, warm (reuse=true)", ("reuse=true",)),
}


def main() -> None:
    """Print a line for each way of running."""
    parser = argparse.ArgumentParser(prog="bench_overhead.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4, help="measurements of each way (default: 4)")
    parser.add_argument("--cells", type=int, default=2, help="cells of a measurement (default: 2)")
    parser.add_argument("--tp-size", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    options = parser.parse_args()
    common = (options.cells, options.tp_size, options.device)
    ways = ["bare", *dict.fromkeys(options.ways)]
    found: dict[str, list[float]] = {way: [] for way in ways}
    whole: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="tpbench-overhead-") as scratch:
        for turn in range(options.rounds):
            for way in ways if turn % 2 == 0 else reversed(ways):
                folder = Path(scratch, f"{way}{turn}")
                if way == "bare":
                    spent = bare(*common, folder)
                else:
                    spent, a_cell = sweep(*common, folder, *WAYS[way][1])
                    whole[way].append(a_cell)
                found[way].append(statistics.median(spent))
    for way, seconds in found.items():
        ratios = [one / base for one, base in zip(seconds, found["bare"], strict=True)]
        name = "bare torchrun, empty worker" if way == "bare" else WAYS[way][0]
        line = f"{name}: {statistics.median(seconds):.2f} s a cell ({statistics.median(ratios):.2f} x bare torchrun)"
        if whole[way]:
            line += f"; a whole sweep of {options.cells + 1} cells: {statistics.median(whole[way]):.2f} s a cell"
        print(line)


if __name__ == "__main__":
    main()
