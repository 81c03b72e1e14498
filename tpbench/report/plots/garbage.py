"""What a figure leaves behind."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def swept_at_once() -> Iterator[None]:
    """Keeps the garbage collector away until the end, when it frees what is no longer in use of all that was made.

    A figure is thousands of objects that refer to each other. The collector would go through them again and again while
    the figure is drawn, take them for objects that stay, and free them late.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
        gc.collect(0)
