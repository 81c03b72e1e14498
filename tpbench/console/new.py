"""`python -m tpbench new FILE.py --workload NAME`: write a file with a variant, or a whole operation, to start from."""

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import tpbench
from tpbench.console.listing import example_arguments
from tpbench.launcher.command_line.outside_choices import FILE_NAME
from tpbench.settings import JobError, user_path
from tpbench.workloads import NAMES, workloads

OPERATION = "new"
"""In place of a workload's name: the file declares its own one."""
EXAMPLES = Path(tpbench.__file__).resolve().parent / "api" / "examples"
DECORATED = re.compile(r"^@(?:\w+\.)?variant\(.*?^def (\w+)", re.MULTILINE | re.DOTALL)
"""The functions of an example that are variants."""


def main(arguments: Sequence[str]) -> int:
    """Write the file and print the command that runs it. The exit code is 0. Raises JobError otherwise."""
    parser = argparse.ArgumentParser(prog="tpbench new", description="Write a file with a variant to start from.")
    parser.add_argument("file", type=user_path, help="the file to write, such as my_loss.py; it must not exist")
    workloads_here = [*(name for name in NAMES if (EXAMPLES / f"{name}.py").exists()), OPERATION]
    what = f"of the variant ({NAMES[0]}); {OPERATION}: an operation of your own"
    parser.add_argument("--workload", choices=workloads_here, default=NAMES[0], help=what)
    options = parser.parse_args(arguments)
    file, workload = options.file, options.workload
    if not FILE_NAME.fullmatch(file.name):
        raise JobError(f"the file can't be called {file.name}: use letters, digits and _ - . of ASCII, and end in .py")
    example = EXAMPLES / ("moe.py" if workload == OPERATION else f"{workload}.py")
    text = example.read_text().replace("FILE:", f"{file.name}:")
    try:
        with file.open("x") as new:
            new.write(text)
    except OSError as error:
        raise JobError(f"{file} cannot be written: {error.strerror}") from None
    functions = DECORATED.findall(text)
    variant = shlex.quote(f"variant={file}:{functions[0]}")
    if workload == OPERATION:
        what = "an operation with two variants. `python -m tpbench docs own_operation` explains it."
        all_variants = ",".join(f"{file}:{name}" for name in functions)
        command = f"-m {shlex.quote(f'variant={all_variants}')} tp_size=2 measure=quick  # check, time and compare them"
    else:
        what = f"the function {functions[0]}, a variant of {workload}. It is correct as it is; make it faster."
        command = f"{variant} {example_arguments(workloads()[workload])}  # check and time it"
    print(f"{file}: {what}\n\n  python -m tpbench {command}")
    print(f"  python -m tpbench list {variant}  # what tpbench reads from the file")
    return 0
