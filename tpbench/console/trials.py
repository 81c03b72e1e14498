"""`python -m tpbench test` and `profile`: a sweep with a fixed composition, and the table that answers it."""

import argparse
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from tpbench.console import listing
from tpbench.launcher.command_line.outside_choices import find_outside
from tpbench.measure import machine
from tpbench.report.command import main as report
from tpbench.results.read import load
from tpbench.settings import JobError, user_path
from tpbench.suggestions import counted, printable_reason, unknown
from tpbench.tables import aligned_lines
from tpbench.workloads import workloads


def main(arguments: Sequence[str]) -> int:
    """Run `test` or `profile`, the first argument. The exit code is 0, or 1 if a cell failed."""
    command, *rest = arguments
    example = "layers=4" if command == "profile" else "loss=reverse_kl"
    further = f"Further arguments are those of a sweep, such as device=cpu or {example}."
    parser = argparse.ArgumentParser(prog=f"tpbench {command}", epilog=further)
    words = [argument for argument in rest if "=" not in argument]
    overrides = [argument for argument in rest if "=" in argument]
    if command == "profile":
        parser.description = "Train blocks without parallelism, with it, and with two kinds of overlap: loss and costs."
        parser.add_argument("variant", nargs="?", help="FILE.py:FUNCTION: write a trace of an iteration of it instead")
        if variant := parser.parse_args(words).variant:
            return _sweep(f"variant={variant}", "profile=true", *overrides)
        return _profile(overrides)
    parser.description = "Check every variant that can run here against the oracle, on tiny shapes."
    parser.add_argument("workload", nargs="*", help=f"of {', '.join(workloads())} (all); or FILE.py:FUNCTION")
    if fixed := [text for text in overrides if text.startswith(("variant=", "shape=", "output_dir="))]:
        parser.error(f"leave out {' '.join(fixed)}: it runs every variant on tiny shapes. For one: -m variant=NAME")
    names = parser.parse_args(words).workload or list(workloads())
    for name in names:
        if name not in workloads() and find_outside(name) is None:
            raise JobError(unknown("workload", name, workloads()))
    return _test(names, overrides)


def _sweep(*arguments: str) -> int:
    """Run a sweep. Of several arguments for one name the last counts."""
    last = {argument.partition("=")[0]: argument for argument in arguments}
    return subprocess.run([sys.executable, "-m", "tpbench", "-m", *last.values()], stdout=sys.stderr).returncode


def _test(names: Sequence[str], overrides: Sequence[str]) -> int:
    """Test the variants of workloads, or of users' files. Print a line for each, and return the exit code."""
    folder = tempfile.mkdtemp(prefix="tpbench-test-")
    one_rank = ["tp_size=1", "dp_size=1"]
    lines: list[list[str]] = []
    for name in names:
        outside = find_outside(name)
        workload = outside.of_workload if outside else workloads()[name]
        shapes = [entry.name for entry in listing.shapes(0, workload.name) if entry.name.startswith("tiny")]
        quick = ["steps=4"] if workload.scheduled is True else ["measure=quick", "time_budget_s=0", "min_iterations=1"]
        output_dir = Path(folder, str(len(lines)))
        size = f"shape={','.join(shapes)}" if shapes else "tp_size=2"
        ranks = one_rank if machine.gpu_count() == 1 else []
        line = [size, *quick, "reuse=true", f"output_dir={output_dir}", *ranks, *overrides]
        code = _sweep(f"variant={name if outside else 'all'}", *line)
        if not (output_dir / "rows").is_dir():  # the sweep was refused, and has said why, or it was a dry run
            shutil.rmtree(folder)
            return code
        with warnings.catch_warnings(action="ignore"):  # these cells measure too little to warn about
            rows = load(output_dir)
            skipped = sorted({*rows["variant"]} - {*rows.loc[rows["status"] != "skipped", "variant"]})
            if skipped and machine.gpu_count() != 1:  # some are for one rank
                _sweep(f"variant={name if outside else ','.join(skipped)}", *line, *one_rank)
                rows = load(output_dir)
        groups = rows.groupby("variant", sort=False)
        lines += [[workload.name, str(variant), *_verdict(cells)] for variant, cells in groups]
    print(*aligned_lines(("workload", "variant", "result", "error", "reason"), lines), sep="\n")
    if failed := sum(line[2] == "FAIL" for line in lines):
        print(f"{counted(failed, 'variant')} failed; rows and logs are in {folder}")
    else:
        print(f"No variant failed, so the rows and logs in {folder} are removed.")
        shutil.rmtree(folder)
    return int(failed > 0)


def _verdict(cells: pd.DataFrame) -> tuple[str, str, str]:
    """Return the verdict on a variant, the largest error, and the reason why it did not run or is wrong."""
    ran = cells[cells["status"] != "skipped"]
    wrong = ran[ran["status"] != "ok"]
    if ran.empty or len(wrong):
        reasons = wrong["reason"] if len(wrong) else cells["reason"]
        return "FAIL" if len(wrong) else "not run", "", printable_reason("; ".join(map(str, reasons.unique())))
    errors = ran.reindex(columns=["grad_error", "loss_error", "output_error"]).bfill(axis="columns").iloc[:, 0]
    return "pass", "" if errors.isna().all() else f"{errors.max():.1e}", ""


def _profile(overrides: Sequence[str]) -> int:
    experiment = "profile" if machine.gpu_count() > 1 else "profile_tiny"
    folder = next((text.partition("=")[2] for text in overrides if text.startswith("output_dir=")), "outputs/profile")
    code = _sweep(f"+experiment={experiment}", f"output_dir={folder}", *overrides)
    if code or "dry_run=true" in map(str.lower, overrides):
        return code
    newest = load(user_path(folder), columns="sweep_id")["sweep_id"].iloc[-1]
    return report([folder, "--only", f"sweep_id={newest}", "--columns", "loss_value,grad_norm,time_ms,peak_gib"])
