"""Limits of the command line: how many cells it may describe, and what its values may refer to."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep

from tpbench.results.printable import printable
from tpbench.settings import JobError

MAX_CELLS = 10_000
"""Most cells of one sweep. Every cell is composed before the first one runs, in 2 to 20 ms each."""

_ENVIRONMENT = re.compile(r"\$\{\s*oc\.(env|\$)")
_CODE = "_target_"
"""Key of Hydra's configuration that names a Python object to call."""


def require_printable(arguments: Sequence[str]) -> None:
    """Raise JobError for an argument with control characters. Options of Hydra may have line breaks."""
    for each in arguments:
        rest = "".join(each.split()) if each.lstrip("+~").startswith("hydra") else each
        if not rest.isprintable():
            raise JobError(f"an argument has characters that a terminal does not print: {printable(each)}")


def require_safe(overrides: Sequence[Override]) -> None:
    """Raise JobError for overrides that describe too many cells, read the environment or name code."""
    errors = [error for each in overrides for error in _errors(each)]
    if errors:
        raise JobError("\n".join(errors))
    if (cells := math.prod(map(_count, overrides))) > MAX_CELLS:
        raise JobError(f"this sweep has {cells} cells; one sweep has at most {MAX_CELLS}: divide it into several")


def _errors(override: Override) -> list[str]:
    line, key = str(override.input_line), str(override.key_or_group)
    errors = []
    if _CODE in line:
        errors.append(f"{printable(line)}: {_CODE} names Python code, which the command line may not")
    if _ENVIRONMENT.search(line) and key != "output_dir" and not key.startswith("hydra"):
        # The value would be in messages and in the rows.
        errors.append(f'{printable(line)} reads a variable of the environment: let the shell do it, {key}="$NAME"')
    return errors


def _count(override: Override) -> int:
    """Return the number of values of an override, without making them."""
    value = override.value()
    if isinstance(value, RangeSweep):
        start, stop, step = value.start or 0, value.stop or 0, value.step or 1
        return max(1, math.ceil((stop - start) / step))
    return max(1, len(value.list)) if isinstance(value, ChoiceSweep) else 1
