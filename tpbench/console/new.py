"""`python -m tpbench new FILE.py --workload NAME`: write a file with a variant, or a whole operation, to start from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import tpbench
from tpbench.console.listing import OWN_SIZE, example_command
from tpbench.launcher.command_line.rewrites import find_outside, is_file_name
from tpbench.outside import source
from tpbench.settings import JobError
from tpbench.workloads import NAMES

OPERATION = "new"
"""In place of a workload's name: the file declares its own one."""
EXAMPLES = Path(tpbench.__file__).resolve().parent / "api" / "examples"


def main(arguments: Sequence[str]) -> int:
    """Write the file and print the command that runs it. The exit code is 0, or 2 if the file cannot be written."""
    parser = argparse.ArgumentParser(
        prog="tpbench new", description="Write a file to start from: a variant, or a workload."
    )
    parser.add_argument("file", help="the file to write, such as my_loss.py; it must not exist")
    parser.add_argument(
        "--workload",
        choices=(*NAMES, OPERATION),
        default=NAMES[0],
        help=f"whose operation the variant implements ({NAMES[0]}); {OPERATION}: an operation of your own",
    )
    options = parser.parse_args(arguments)
    try:
        print(_write(Path(options.file), options.workload), end="")
    except JobError as error:
        print(f"tpbench: {error}", file=sys.stderr)
        return 2
    return 0


def _write(file: Path, workload: str) -> str:
    """Write the file. Return its description with a command. Raises JobError if that is not possible."""
    if not is_file_name(file.name):
        raise JobError(f"{file.name} is no name for the file: take letters, digits and _ - . of ASCII, and end in .py")
    example = EXAMPLES / ("moe.py" if workload == OPERATION else f"{workload}.py")
    try:
        with file.open("x") as new:
            new.write(example.read_text().replace("FILE:", f"{file.name}:"))
    except FileExistsError:
        raise JobError(f"{file} exists already") from None
    except FileNotFoundError:
        raise JobError(f"there is no folder {file.parent}: make it first") from None
    except OSError as error:
        raise JobError(f"{file} cannot be written: {error.strerror}") from None
    functions = [each.name for each in source.functions(file).values() if each.declared is not None]
    if workload == OPERATION:
        variants = ",".join(f"{file}:{function}" for function in functions)
        return (
            f"{file}: an operation with two variants. `python -m tpbench docs own_operation` explains it.\n\n"
            f"  python -m tpbench -m variant={variants} {OWN_SIZE}  # check, time and compare them\n"
            f"  python -m tpbench list variant={file}:{functions[0]}  # its fields, which are options\n"
        )
    (function,) = functions
    variant = find_outside(f"{file}:{function}")
    assert variant is not None
    return (
        f"{file}: the function {function}, a variant of {workload}. It is correct as it is; make it faster.\n\n"
        f"  python -m tpbench variant={file}:{function} {example_command(variant)}  # check and time it\n"
        f"  python -m tpbench list variant={file}:{function}  # what tpbench reads from the file\n"
    )
