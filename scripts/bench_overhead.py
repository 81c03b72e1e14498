#!/usr/bin/env python3
"""Seconds that a cell costs above its measurement: cold, warm, bare torchrun of an empty worker, Hydra's launcher.

scripts/bench_overhead.py [--cells 6] [--tp-size 2] [--device auto]
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
    """torchrun of a worker that only joins its group."""
    worker = folder / "empty.py"
    worker.write_text(EMPTY)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
            "--monitor-interval=0.1", str(worker)]  # fmt: skip
    env = {**os.environ, "DEVICE": device, "OMP_NUM_THREADS": "1"}
    spent = []
    for _ in range(cells):
        began = time.perf_counter()
        subprocess.run(line, env=env, check=True, capture_output=True)
        spent.append(time.perf_counter() - began)
    return spent


def sweep(cells: int, ranks: int, device: str, folder: Path, *more: str) -> list[float]:
    """A sweep's time from each row to the next, which is what a cell costs. The first is left out: Hydra starts in it.

    The job is one whose measurement is three iterations of next to nothing.
    """
    folder.mkdir()
    line = [sys.executable, "-m", "tpbench", "-m", f"seed={','.join(map(str, range(cells + 1)))}",
            "variant=pytorch_tp_manual", "tokens=16", "vocab=64", f"tp_size={ranks}", f"device={device}",
            "measure=quick", "min_iterations=3", "max_iterations=3", *more]  # fmt: skip
    subprocess.run(
        line, env={**os.environ, "PYTHONPATH": str(_checkout.ROOT)}, check=True, capture_output=True, cwd=folder
    )
    rows = tpbench.load(folder / "outputs")
    assert set(rows["status"]) == {"ok"}
    ended = rows["finished_at"].sort_values()
    return [float(each) for each in ended.diff().dt.total_seconds().dropna()]


def main() -> None:
    """Print a line for each way of running."""
    parser = argparse.ArgumentParser(prog="bench_overhead.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, default=6, help="cells of each (default: 6)")
    parser.add_argument("--tp-size", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    options = parser.parse_args()
    common = (options.cells, options.tp_size, options.device)
    with tempfile.TemporaryDirectory(prefix="tpbench-overhead-") as scratch:
        base = bare(*common, Path(scratch))
        found = {
            "bare torchrun, empty worker": base,
            "tpbench, cold": sweep(*common, Path(scratch, "cold")),
            "tpbench, warm (reuse=true)": sweep(*common, Path(scratch, "warm"), "reuse=true"),
            "Hydra's basic launcher": sweep(*common, Path(scratch, "basic"), "hydra/launcher=basic"),
        }
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        print(f"{name}: {middle:.2f} s a cell ({middle / statistics.median(base):.2f} x bare torchrun)")


if __name__ == "__main__":
    main()
