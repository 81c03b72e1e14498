"""torchrun that also leaves a file with the exit codes of its failed ranks: `python -m tpbench.worker.torchrun ARGS`.

The arguments are torchrun's. torch's own error files name only Python exceptions: a rank that a signal killed leaves
none. torchrun knows the exit code of every rank, but prints it for people only.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from tpbench.worker.start import AGENT, BACKEND, STORE_FILE, import_once

FAILURES_FILE = "failures.json"


class RankFailure(NamedTuple):
    """A rank that did not end with exit code 0."""

    rank: int
    local_rank: int
    exit_code: int
    """Negative: the number of the signal that killed the rank."""


def main() -> None:
    """Run torchrun; after a failure of ranks save it in the folder of the logs (`--log-dir`)."""
    import_once("torch.distributed.run", "tpbench.worker.rendezvous")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    from tpbench.worker.rendezvous import FixedNodes

    rendezvous_handler_registry.register(BACKEND, FixedNodes)
    os.environ[AGENT] = str(os.getpid())
    try:
        run.main()
    except ChildFailedError as error:
        failures = [RankFailure(rank, failure.local_rank, failure.exitcode) for rank, failure in error.failures.items()]
        folder = Path(run.parse_args(None).log_dir)  # type: ignore[no-untyped-call]
        (folder / FAILURES_FILE).write_text(json.dumps(failures))
        raise
    finally:  # the launcher does so too, unless it was killed
        shutil.rmtree(Path(os.environ[STORE_FILE]).parent, ignore_errors=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the end of an interpreter with torch takes another 0.4 s
