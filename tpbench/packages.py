"""Packages that tpbench needs, and the commands that install them. This module imports the standard library only."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import shlex
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

REQUIRED = (
    *("torch", "triton", "numpy", "scipy", "pandas", "pyarrow"),
    *("hydra", "omegaconf", "yaml", "rich", "jinja2", "psutil", "pynvml"),
)
"""The modules of the packages that the benchmark needs: those that setup.cfg requires, and its extra `bench`."""

OPTIONAL = {
    "matplotlib": "[report]",
    "submitit": "[slurm]",
    "liger_kernel": "[peers]",
    "megatron": "[peers]",
    "quack": "[peers]",
    "deepspeed": "[train]",
    "transformers": "[train]",
    "fast_llm": "--no-deps git+https://github.com/ServiceNow/Fast-LLM",
    "flash_attn": "flash-attn --no-build-isolation",
    "cut_cross_entropy": "cut-cross-entropy",
    "cutlass": "nvidia-cutlass-dsl",
    "verl": "verl",
}
"""The module of each optional package, with an extra of setup.cfg that installs it, or the arguments of pip."""


def installed(module: str) -> bool:
    """Return true if the top-level module can be found. The module is not imported."""
    return importlib.util.find_spec(module) is not None


def is_library(file: Path) -> bool:
    """Return True if a file of code is of Python's own library or of an installed package."""
    own = (sysconfig.get_path("stdlib"), "<")
    return str(file).startswith(own) or not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


def is_own(file: Path) -> bool:
    """Return True if a file of code is of this package."""
    return file.resolve().is_relative_to(Path(__file__).resolve().parent)


def short_name(file: Path) -> str:
    """Return a file's name for a row, which must not hold a user's folders. Files of this package have theirs."""
    return str(file.resolve().relative_to(Path(__file__).resolve().parents[1])) if is_own(file) else file.name


def missing(modules: Iterable[str]) -> list[str]:
    """Return those of the top-level modules that cannot be found."""
    return [module for module in modules if not installed(module)]


def versions(modules: Iterable[str]) -> str | None:
    """Return the installed optional packages of these modules, such as `transformers 5.17.0, verl unknown`, or None.

    A module whose package has no metadata is `MODULE unknown`. Nothing is imported.
    """
    versions = (_versions_of(module) for module in modules if module not in REQUIRED)
    return ", ".join(dict.fromkeys(text for texts in versions for text in texts)) or None


_packages_of_modules = functools.cache(importlib.metadata.packages_distributions)


@functools.cache  # a sweep asks for each of its cells
def _versions_of(module: str) -> list[str]:
    packages = sorted(set(_packages_of_modules().get(module, ())))
    names = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return names or [f"{module} unknown"] * installed(module)


def checkout() -> Path | None:
    """Return the folder of the checkout that this package lies in, or None if this package was installed elsewhere."""
    folder = Path(__file__).resolve().parents[1]
    return folder if (folder / "setup.cfg").is_file() else None


def pip_install(arguments: str) -> str:
    """Return the shell command that installs packages into the environment of this Python."""
    return f"{shlex.quote(sys.executable)} -m pip install {arguments}"


def install_command(extra: str) -> str:
    """Return the shell command that installs tpbench, with one of its extras, into the environment of this Python.

    No package index has tpbench, so in a checkout the command names the folder.
    """
    folder = checkout()
    return pip_install(f"-e {shlex.quote(f'{folder}[{extra}]')}" if folder else shlex.quote(f"tpbench[{extra}]"))


def install_commands(modules: Iterable[str]) -> str:
    """Return the commands that install these optional packages."""
    arguments = dict.fromkeys(OPTIONAL[name] for name in modules if name in OPTIONAL)
    return " and ".join(
        install_command(name[1:-1]) if name.startswith("[") else pip_install(name) for name in arguments
    )


def not_installed(modules: Collection[str]) -> str:
    """Return `needs A, B (not installed)`, with the commands that install them if they are optional packages."""
    commands = install_commands(modules)
    return f"needs {', '.join(modules)} (not installed){': ' if commands else ''}{commands}"


def explanation(error: ModuleNotFoundError) -> str | None:
    """Return in one line how to install the package that the error is about, or None if tpbench does not declare it."""
    module = (error.name or "").partition(".")[0]
    if module not in (*REQUIRED, *OPTIONAL) or installed(module):  # an installed package may lack a part: a bug
        return None
    if module in OPTIONAL:
        return f"tpbench: this command {not_installed([module])}"
    absent = [name for name in REQUIRED if name == module or not installed(name)]
    return f"tpbench: the benchmark {not_installed(absent)}: {install_command('bench')}"


@contextlib.contextmanager
def explain_missing() -> Iterator[None]:
    """End the program with exit code 2 and an explanation if a package of tpbench is missing, and quietly at Ctrl-C.

    It is a decorator too.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if not (text := explanation(error)):
            raise
        print(text, file=sys.stderr)
        sys.exit(2)
