"""torchrun that also leaves a file with the exit codes of its failed ranks: `python -m tpbench.worker.torchrun ARGS`.

The arguments are torchrun's. torch's own error files name only Python exceptions: a rank that a signal killed leaves
none. torchrun knows the exit code of every rank, but prints it for people only.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from tpbench.worker.result import RankFailure, save_failures
from tpbench.worker.start import STORE_FILE, import_once


def main() -> None:
    """Run torchrun; after a failure of ranks save it in the folder of the logs (`--log-dir`)."""
    import_once("torch.distributed.run", "tpbench.worker.rendezvous")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from tpbench.worker import rendezvous

    rendezvous.register()
    try:
        run.main()
    except ChildFailedError as error:
        failures = [RankFailure(rank, failure.local_rank, failure.exitcode) for rank, failure in error.failures.items()]
        save_failures(failures, Path(run.parse_args(None).log_dir))  # type: ignore[no-untyped-call]
        raise
    finally:
        _remove_store()


def _remove_store() -> None:
    """Delete the file of the store and its folder. The launcher does so too, but it may be dead."""
    file = Path(os.environ.get(STORE_FILE, "none"))
    with contextlib.suppress(OSError):
        file.unlink()
        file.parent.rmdir()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the end of an interpreter with torch takes another 0.4 s
