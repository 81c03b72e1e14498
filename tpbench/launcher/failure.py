"""What a job is doing, and what one that left no row died of, read from its logs."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from pathlib import Path

TAIL_LINES = 12
TAIL_BYTES = 16_384

EXIT_PEER_LOST = 71
"""A worker's exit code when a collective broke under it: another rank is the one to ask."""

EXIT_CROWDED = 72
"""A worker's exit code when memory ran out that it shared with cells that took turns with it."""

_FAILED_RANK = re.compile(r"rank +: (\d+) \(local_rank: (\d+)\)\s+exitcode +: (-?\d+)")
"""torchrun's summary of the failed ranks: it has no form made for programs."""

_SAID = re.compile(r"^\[[\d.]+ s\] rank \d+: (.+)$", re.MULTILINE)
"""What a rank begins, as the worker says it on stderr."""

_NATIVE_OOM = re.compile(r"std::bad_alloc|[Cc]annot allocate memory|out of memory")
"""How C++ says it: a thread of gloo or NCCL ends the process before Python could catch anything."""


def describe(agent_code: int | None, timeout_s: float, agent_log: Path, log_dir: Path) -> tuple[str, str]:
    """Status and reason of a job without a row. `agent_code` is torchrun's exit code, None when it ran too long."""
    if agent_code is None:
        return "timeout", _join(f"still running after {timeout_s:g} s", _last_words(log_dir, ranks(log_dir)))
    failed = [(int(code), int(rank), int(local)) for rank, local, code in _FAILED_RANK.findall(_text(agent_log))]
    if not failed:
        return "error", _join(f"torchrun ended with {_code(agent_code)}", tail(agent_log))
    # torchrun ends the others with SIGTERM, and they may be quicker to fail than it is to notice who was first.
    code, rank, local = min(failed, key=lambda each: each[0] in (-signal.SIGTERM, EXIT_PEER_LOST))
    words = tail(_stderr(log_dir, local))
    status = "oom" if code == EXIT_CROWDED or (code < 0 and _NATIVE_OOM.search(words)) else "error"
    return status, _join(f"rank {rank} ended with {_code(code)}", words)


def is_consequence(agent_log: Path) -> bool:
    """Whether all ranks of this node that failed only lost their peers: another node knows why."""
    codes = [int(code) for _, _, code in _FAILED_RANK.findall(_text(agent_log))]
    return bool(codes) and all(code in (-signal.SIGTERM, EXIT_PEER_LOST) for code in codes)


def doing(folder: Path) -> str:
    """What rank 0 of a job at work, whose folder this is, said last that it begins; nothing before its first word."""
    logs = sorted(folder.rglob("attempt_0/0/stderr.log"))
    return next(reversed(_SAID.findall(_text(logs[-1]))), "") if logs else ""


def last_words(folder: Path) -> str:
    """The last line of each rank that left logs anywhere in the folder."""
    logs = sorted(folder.rglob("attempt_0/*/stderr.log"))
    return "\n".join(f"rank {each.parent.name} ({each.parents[2].name}): {tail(each, lines=1)}" for each in logs)


def ranks(log_dir: Path) -> list[int]:
    """The local ranks that left a log."""
    return sorted(int(each.parent.name) for each in log_dir.glob("*/attempt_0/*/stderr.log"))


def _last_words(log_dir: Path, of: Iterable[int]) -> str:
    return "\n".join(f"rank {rank}: {tail(_stderr(log_dir, rank), lines=3)}" for rank in of)


def _stderr(log_dir: Path, rank: int) -> Path:
    return next(iter(log_dir.glob(f"*/attempt_0/{rank}/stderr.log")), log_dir / "none")


def _code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def _join(what: str, words: str) -> str:
    return f"{what}; the last lines:\n{words}" if words else what


def tail(file: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, if there is one."""
    return "\n".join(_text(file).strip().splitlines()[-lines:])


def _text(file: Path) -> str:
    """The end of a log, which may hold anything."""
    try:
        with file.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - TAIL_BYTES))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
