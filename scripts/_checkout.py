"""The scripts import this module first. It finds the package and a Python that has what the package needs."""

import os
import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"

if (ROOT / "tpbench" / "__init__.py").is_file():  # the checkout's package comes before an installed one
    sys.path.insert(0, str(ROOT))

from tpbench import packages  # noqa: E402  it needs the path

if not packages.installed("pandas") and PYTHON.exists() and Path(sys.prefix) != ROOT / ".venv":
    # This Python lacks packages. scripts/run or scripts/test has made an environment that has them.
    os.execv(PYTHON, [str(PYTHON), *sys.argv])


def _explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print how to install a missing package instead of a traceback, and exit with 2."""
    text = packages.explanation(error) if isinstance(error, ModuleNotFoundError) else None
    if text:
        print(text, file=sys.stderr)
        sys.exit(2)
    sys.__excepthook__(kind, error, trace)


sys.excepthook = _explain
