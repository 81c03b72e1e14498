"""torchrun that opens no port, and leaves a file with the exit codes of its failed ranks.

`python -m tpbench.worker.torchrun ARGS` takes torchrun's arguments. torch's own error files name only Python
exceptions: a rank that a signal killed leaves none. torchrun's own rendezvous (c10d) listens on all interfaces and
unpickles its state, which everyone who reaches the port can write. Here all processes of a job share a file.
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
    exit_code: int
    """Negative: the number of the signal that killed the rank."""


def register_rendezvous() -> None:
    """Make the rendezvous known to torch: one node, whose store is a file in a folder of mode 0700."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class OneHost(StaticTCPRendezvous):
        def __init__(self, parameters: RendezvousParameters) -> None:
            super().__init__("127.0.0.1", 0, rank=0, world_size=1, run_id=parameters.run_id, timeout=0)

        def get_backend(self) -> str:
            return BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            store = FileStore(os.environ[STORE_FILE])
            return RendezvousInfo(store, self.rank, self.world_size, RendezvousStoreInfo("127.0.0.1", 0))

    registry.register(BACKEND, OneHost)


def main() -> None:
    """Run torchrun; after a failure of ranks save it in the folder of the logs (`--log-dir`)."""
    import_once("torch.distributed.run")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    register_rendezvous()
    os.environ[AGENT] = str(os.getpid())
    try:
        run.main()
    except ChildFailedError as error:
        failures = [RankFailure(rank, failure.exitcode) for rank, failure in error.failures.items()]
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
