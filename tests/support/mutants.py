"""`scripts/mutants`: change one operator or constant at a time, and count the mutants that the unit tests notice.

cosmic-ray makes the mutants, in a copy of the checkout. A mutant is tested with the tests of its package's folder that
run its line. coverage.py finds those tests in a first run. Each mutant has its own process, which is forked from one
that has collected the tests.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.support.mutants_made import Mutant, all_mutants
from tests.support.mutants_tested import CAUGHT, SURVIVED, TIMEOUT, outcomes

ROOT = Path(__file__).resolve().parents[2]
WORKLOADS = ("embedding_grad", "entropy_loss", "linear_loss", "tp_block", "train_step")
PACKAGES = {
    **{name: (f"tpbench/{name}", f"tests/unit/{name}") for name in ("measure", "results", "report", "predict")},
    "job": ("tpbench/job.py", "tests/unit/test_job.py"),
    "settings": ("tpbench/settings.py", "tests/unit/test_settings.py"),
    **{
        f"oracle of {name}": (f"tpbench/workloads/{name}/oracle.py", f"tests/unit/workloads/{name}")
        for name in WORKLOADS
    },
}
"""Sources that are changed, and the folder or file of their tests. The tests of `ALSO` are tests of them, too."""
ALSO = {"report": ("tests/unit/console/test_pictures.py",)}
"""The committed pictures of pages are drawn by reports."""

PRELOADED = (
    "hypothesis", "hydra", "jinja2", "matplotlib.pyplot", "numpy", "omegaconf", "pandas", "pyarrow.parquet", "pytest",
    "rich.console", "rich.table", "scipy.optimize", "torch.distributed", "triton",
)  # fmt: skip
"""Modules that are imported before processes are forked. Nothing of tpbench is among them: it changes."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"default: {', '.join(PACKAGES)}")
    parser.add_argument("--sample", type=int, default=300, help="number of random mutants (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="mutants side by side (default: cores)")
    options = parser.parse_args(arguments)
    if unknown := set(options.packages) - set(PACKAGES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")

    with tempfile.TemporaryDirectory(prefix="tpbench-mutants-") as folder:
        copy_checkout(Path(folder))
        for name in PRELOADED:
            importlib.import_module(name)
        names = options.packages or list(PACKAGES)
        mutants = [each for name in names for each in all_mutants(name, Path(PACKAGES[name][0]))]
        chosen = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
        chosen.sort(key=lambda mutant: (names.index(mutant.package), mutant.path, mutant.lines[0], mutant.operator))
        print(f"{len(chosen)} of {len(mutants)} places, seed {options.seed}", flush=True)
        ended = Counter(test_all(chosen, options.processes))
    print_table(names, ended)
    return 0


def copy_checkout(folder: Path) -> None:
    """Copy what git knows into the folder, and work there. Compiled files are valid by their source's hash."""
    known = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(known, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        target = folder / name
        if not (ROOT / name).exists():  # removed, but not yet committed
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    os.chdir(folder)
    compiling = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "tpbench", "tests"]
    subprocess.run(compiling, check=True)


def test_all(mutants: list[Mutant], processes: int) -> list[tuple[str, str]]:
    """Test each mutant, print the survivors, and return a package and an outcome for each."""
    ended: list[tuple[str, str]] = []
    for package in dict.fromkeys(mutant.package for mutant in mutants):
        source, folder = PACKAGES[package]
        own = [mutant for mutant in mutants if mutant.package == package]
        for mutant, found in outcomes(own, source, [folder, *ALSO.get(package, ())], processes):
            ended.append((package, found))
            if found != CAUGHT:
                counted = f"{len(ended)}/{len(mutants)}"
                print(f"\n{counted} {found}: {mutant.path}:{mutant.lines[0]}\n{mutant.difference()}", flush=True)
    return ended


def print_table(names: list[str], ended: Counter[tuple[str, str]]) -> None:
    columns = (CAUGHT, TIMEOUT, SURVIVED)
    print(f"\n| package | {' | '.join(columns)} | share noticed |\n|---|---:|---:|---:|---:|")
    for name in [*names, "all"]:
        counts = [
            sum(n for (of, found), n in ended.items() if name in (of, "all") and found == each) for each in columns
        ]
        if total := sum(counts):
            print(f"| {name} | {' | '.join(map(str, counts))} | {(total - counts[2]) / total:.0%} |")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
