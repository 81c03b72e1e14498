"""`scripts/campaign --minutes N`: random kills, bit flips, hostile rows and hostile command lines.

Each trial has a number, from which all its random choices follow: `--seed NUMBER` begins with that trial.
"""

import argparse
import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import tpbench
from tests.support import synthetic
from tests.support.command import FORKED_COMMANDS, environment
from tests.support.disturbed_sweeps import AT_RANDOM_MOMENTS
from tests.support.random_faults import MODES, SIGNALS, disturbed_sweep
from tpbench.report.command import main as report
from tpbench.results.compact import compact
from tpbench.results.read import RowWarning
from tpbench.results.row_files import with_checksum
from tpbench.results.write import write_row

FLIPS, ROWS, LINES = 50, 10, 10
"""Bit flips, rows and command lines of one trial."""

TEXTS = (
    "<script>alert(1)</script>", "\x1b[31m\x1b]0;x\x07", "=cmd|' /C calc'!A0", "| a | b |\n|---|---|", "\u202eabc",
    "\0", "../../etc/passwd", "{{7*7}}", "x" * 100_000, "${oc.env:HOME}", "[link](javascript:alert(1))", "\ud800", "",
)  # fmt: skip
"""Values that mean something to a terminal, a browser, a spreadsheet, Markdown or Hydra."""

NAMES = (
    "seed", "tokens", "variant", "loss", "dtype", "shape", "vocab", "measure", "output_dir", "+x", "~seed",
    "hydra.sweep.dir", "hydra/launcher", "hydra/job_logging", "hydra.sweeper._target_",
    "hydra.job_logging.handlers.file.class",
)  # fmt: skip
VALUES = (
    *TEXTS[:-2], "1", "-1", "nan", "1e400", "range(0,1000000000)", "choice(", "glob(*)", "${tokens}", "${seed}",
    "${evil:1}", "[1,2", "{a:1}", "null", "true", "'", "os.system", "default", "9" * 5000, "a,b,,c",
)  # fmt: skip
"""Names and values of which random arguments are made."""


def kill(chance: random.Random, folder: Path) -> int:
    """Disturb a sweep twice in one folder. Return the number of trials."""
    for seeds in (1, 2):
        disturbed_sweep(chance.choice(AT_RANDOM_MOMENTS), "cold", folder, seeds, chance)
    return 2


def interrupt(chance: random.Random, folder: Path) -> int:
    """Send a signal to a sweep at a random moment. It ends soon, and leaves nothing. Return 0 if it had ended before.

    Slurm takes part if the environment leads to one.
    """
    modes = [mode for mode in MODES if mode != "slurm" or "SLURM_CONF" in os.environ]
    return int(disturbed_sweep(chance.choice(list(SIGNALS)), chance.choice(modes), folder, 2, chance))


def flip(chance: random.Random, folder: Path) -> int:
    """Change single bits of a row file and of a merged file. Each damaged file must be named, and no row read."""
    synthetic.write([synthetic.cell("triton_tp", 32768, 1, run=str(each)) for each in range(3)], folder / "sound")
    (row, *_) = (folder / "sound" / "rows").glob("*.parquet")
    files = [row.read_bytes()]
    compact(folder / "sound")
    files += [each.read_bytes() for each in (folder / "sound" / "rows").glob("merged-*.parquet")]
    (folder / "flipped").mkdir()
    for number in range(FLIPS):
        content = bytearray(files[number % 2])
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        (folder / "flipped" / f"{number}.parquet").write_bytes(content)
    frame, complaints = _load(folder / "flipped")
    assert frame == 0 and len(complaints) == FLIPS, (frame, complaints)
    return FLIPS


def hostile_rows(chance: random.Random, folder: Path) -> int:
    """Write rows with hostile values, and files that are no rows. Reports print neither control characters nor HTML."""
    rows = folder / "rows"
    for number in range(ROWS):
        row = synthetic.cell("triton_tp", chance.choice((32768, 65536)), 1)
        for name in chance.sample([name for name, value in row.items() if isinstance(value, str)], 4):
            row[name] = chance.choice(TEXTS) if name not in ("status", "workload") else row[name]
        write_row(row, folder, f"r{number}")
        content = bytearray(next(rows.glob(f"r{number}.parquet")).read_bytes())
        start = chance.randrange(len(content))
        content[start : start + 8] = chance.randbytes(8)
        (rows / f"damaged{number}.parquet").write_bytes(content)
        (rows / f"cut{number}.parquet").write_bytes(content[:start])
        (rows / f"resealed{number}.parquet").write_bytes(with_checksum(bytes(content).replace(b"sha256", b"sha-no")))
    sound, _ = _load(folder)
    assert sound >= ROWS, sound
    for kind in ("text", "markdown", "csv", "html"):
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = report([str(folder), "--format", kind])
        printed = output.getvalue() + errors.getvalue()
        assert code == 0, (kind, printed)
        if kind == "html":
            assert "<script>alert" not in printed
        else:
            assert not {each for each in printed if not each.isprintable()} - {"\n", "\r"}, (kind, printed)
    return ROWS


def hostile_lines(chance: random.Random, folder: Path) -> int:
    """Give random arguments to dry runs. Each ends by itself, without a traceback and without control characters."""
    commands = []
    for number in range(LINES):
        (folder / str(number)).mkdir()
        line = [f"{chance.choice(NAMES)}={chance.choice(VALUES)}" for _ in range(chance.randint(1, 3))]
        line = [each.replace("\0", "").encode("utf-8", "replace").decode() for each in line]
        line = [*(["-m"] if chance.random() < 0.5 else []), *line, "dry_run=true", "device=cpu"]
        commands.append((str(folder / str(number)), line))
    program = [sys.executable, "-c", FORKED_COMMANDS]
    done = subprocess.run(program, input=json.dumps(commands), env=environment(), capture_output=True, text=True,
                          timeout=300)  # fmt: skip
    for code, (place, line) in zip(done.stdout.split(), commands, strict=True):
        printed = Path(place, "stdout").read_text() + Path(place, "stderr").read_text()
        assert code in ("0", "1"), (code, line, printed)
        assert "Traceback" not in printed, (line, printed)
        assert not {each for each in printed if not each.isprintable()} - {"\n"}, (line, printed)
    return LINES


ATTACKS: dict[str, Callable[[random.Random, Path], int]] = {
    "kills of a sweep": kill,
    "signals to a sweep": interrupt,
    "bit flips": flip,
    "hostile rows": hostile_rows,
    "hostile command lines": hostile_lines,
}


def _load(folder: Path) -> tuple[int, list[str]]:
    """Return the number of rows, and the warnings about files."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RowWarning)
        rows = len(tpbench.load(folder))
    return rows, [str(each.message) for each in caught]


def main() -> int:
    """Attack until the time is over. Print a table of trials and failures, and return 1 if there was a failure."""
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, required=True, help="how long to attack")
    parser.add_argument("--seed", type=int, default=0, help="number of the first trial")
    parser.add_argument("--attack", choices=ATTACKS, help="only this attack")
    asked = parser.parse_args()
    attacks = {asked.attack: ATTACKS[asked.attack]} if asked.attack else ATTACKS
    deadline, seed = time.monotonic() + 60 * asked.minutes, asked.seed
    trials, failures = Counter[str](), Counter[str]()
    while time.monotonic() < deadline:
        for name, attack in attacks.items():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    trials[name] += attack(random.Random(seed), Path(folder))
                except Exception as error:  # each error is a finding; the campaign goes on
                    trials[name] += 1
                    failures[name] += 1
                    print(f"{name}, --seed {seed}: {type(error).__name__}: {str(error)[-2000:]}", file=sys.stderr)
        seed += 1
    print("| attack | trials | failures |\n| --- | --- | --- |")
    for name in attacks:
        print(f"| {name} | {trials[name]} | {failures[name]} |")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
