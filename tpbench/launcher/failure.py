"""Why a job left no result: what torchrun and the logs of its ranks tell."""

import json
import re
import signal
from pathlib import Path

from tpbench import packages
from tpbench.suggestions import with_lines
from tpbench.worker.start import PEER_LOST
from tpbench.worker.torchrun import FAILURES_FILE, RankFailure

AGENT_LOG = "torchrun.log"

LOST_PEERS = (-signal.SIGTERM, PEER_LOST)
"""Exit codes of a rank whose peers had ended before."""

TAIL_LINES, TAIL_BYTES = 12, 16_384

_STACK = re.compile(r"^(Stack|Current thread .+) \(most recent call first\)", re.MULTILINE)
_ANY_STACK = re.compile(r"^.*\(most recent call first\)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
"""Lines that faulthandler writes: the first one of the main or crashed thread, that of any thread, and one for each
frame, the innermost first. Behind the stacks of a crash it lists extension modules, which say nothing."""

_NATIVE_OOM = re.compile(r"std::bad_alloc|[Cc]annot allocate memory|out of memory")
"""Messages of C++ code that runs out of memory: a thread of gloo or NCCL ends the process before Python can."""


def describe(code: int | None, timeout_s: float, folder: Path) -> tuple[str, str]:
    """Return status and reason of an attempt without a result. `code`: torchrun's exit code; None: it ran too long."""
    logs = {int(log.parent.name): _text(log) for log in folder.glob("*/attempt_0/*/stderr.log")}
    if code is None:
        told = {rank: filter(None, (_last_words(log, 1), _innermost_calls(log))) for rank, log in logs.items()}
        ranks = [f"rank {rank}: {'; '.join(told[rank])}" for rank in sorted(logs)]
        return "timeout", "\n".join([f"still running after timeout_s={timeout_s:g}{':' * bool(ranks)}", *ranks])
    failures = _failures(folder)
    quiet = logs.keys() - {failure.local_rank for failure in failures}
    if quiet and (code == 0 or _only_lost_peers(failures)):
        rank = min(quiet)
        sentence = f"rank {rank} ended with exit code 0 before its result, as os._exit(0) does"
        return "error", with_lines(sentence, _last_words(logs[rank], 3))
    if not failures:
        return "error", with_lines(f"torchrun ended with {_code(code)}", tail(folder / AGENT_LOG))
    # torchrun ends the other ranks with SIGTERM, and they may fail before it notices which rank was the first.
    first = min(failures, key=lambda failure: failure.exit_code in LOST_PEERS)
    log = logs.get(first.local_rank, "")
    lines = "\n".join(filter(None, (_last_words(log, TAIL_LINES), _innermost_calls(log))))
    out_of_memory = first.exit_code < 0 and _NATIVE_OOM.search(lines)
    status = "oom" if out_of_memory else "error"
    return status, with_lines(f"rank {first.rank} ended with {_code(first.exit_code)}", lines)


def is_consequence(folder: Path) -> bool:
    """Return True if the failed ranks of this node only lost their peers: then another node knows the reason."""
    return _only_lost_peers(_failures(folder))


def _only_lost_peers(failures: list[RankFailure]) -> bool:
    return bool(failures) and all(failure.exit_code in LOST_PEERS for failure in failures)


def _failures(folder: Path) -> list[RankFailure]:
    """Return the failed ranks of an attempt: none if torchrun left no file, or was killed as it wrote it."""
    logs = (folder / AGENT_LOG).resolve().parent  # the log of a reused torchrun is a link in the folder of each attempt
    try:
        return [RankFailure(*failure) for failure in json.loads((logs / FAILURES_FILE).read_text())]
    except (OSError, ValueError):
        return []


def last_lines(folder: Path) -> str:
    """Return the last line of each rank that wrote one into a log in the folder of a Slurm job's attempt."""
    logs = {log: tail(log, lines=1) for log in sorted(folder.rglob("attempt_0/*/stderr.log"))}
    places = {log: f"{log.parents[3].name}, local rank {log.parent.name}" for log in logs}
    return "\n".join(f"{places[log]}: {line}" for log, line in logs.items() if line)


def tail(file: Path, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log, or an empty string if there is none."""
    return "\n".join(_text(file).strip().splitlines()[-lines:])


def _last_words(log: str, lines: int) -> str:
    """Return the last lines of a rank's log before the stacks in it."""
    return "\n".join(_ANY_STACK.split(log, 1)[0].strip().splitlines()[-lines:])


def _innermost_calls(log: str) -> str:
    """Return the innermost calls of a rank that wrote its stack: in the user's files or, without these, in tpbench."""
    if (begin := _STACK.search(log)) is None:
        return ""
    stack = log[begin.end() :].partition("\n\n")[0]
    calls = [(Path(file), f"{line} ({name})") for file, line, name in _FRAME.findall(stack)]
    of_user = [(file, place) for file, place in calls if not (packages.is_library(file) or packages.is_own(file))]
    of_tpbench = [(file, place) for file, place in calls if packages.is_own(file)]
    places = [f"{packages.short_name(file)}:{place}" for file, place in (of_user or of_tpbench or calls)[:3]]
    return f"now in {', called in '.join(places)}" if places else ""


def _code(code: int) -> str:
    names = {int(number): f" ({number.name})" for number in signal.Signals}
    return f"exit code {code}" if code >= 0 else f"signal {-code}{names.get(-code, '')}"


def _text(file: Path) -> str:
    """Return the end of a log, which may hold any bytes."""
    try:
        with file.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - TAIL_BYTES))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
