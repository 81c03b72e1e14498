"""Signals that end a sweep. A handler only notes the signal; the loops of a sweep raise it at places that are safe.

An exception out of a handler could come inside any library: with a lock held, or a file half written.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGHUP comes when a terminal or a connection closes. A process under `nohup` ignores it, and continues to do so."""

EXIT_CODE = 130
"""Exit code of an interrupted process, as shells have it for Ctrl-C."""

_received: list[int] = []
_meanwhile: list[Callable[[], None]] = []


class Terminated(BaseException):
    """SIGINT, SIGTERM or SIGHUP reached this process. As KeyboardInterrupt, no `except Exception` catches it."""


def exit_at_once() -> None:
    """Let each signal end this process at once, before a sweep begins and after it: nothing is half done then."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os._exit(EXIT_CODE))


@contextlib.contextmanager
def noted(meanwhile: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Only note signals in this block, for `check`, which calls `meanwhile`. A second one ends the process at once."""

    def note(number: int, frame: FrameType | None) -> None:
        if _received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        _received.append(number)

    _received.clear()
    _meanwhile.append(meanwhile)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield
    finally:
        _meanwhile.remove(meanwhile)
        for number, handler in before.items():
            signal.signal(number, handler)


def check() -> None:
    """Raise Terminated, once, if a signal has come. The loops of a sweep call this where nothing is half done."""
    if _received and _received[0]:
        _received[0] = 0
        raise Terminated
    for call in _meanwhile:
        call()


def sleep(seconds: float) -> None:
    """Sleep, and raise Terminated if a signal comes meanwhile or has come before."""
    check()
    deadline = time.monotonic() + seconds
    while (rest := deadline - time.monotonic()) > 0:
        time.sleep(min(rest, 0.1))
        check()
