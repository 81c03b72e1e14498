"""Memory through which the programs of one launch, and of successive launches, exchange row states."""

from __future__ import annotations

import ctypes
import functools

import torch
import triton

from tpbench.kernels.one_pass.tiling import next_power_of_2

WAIT_LIMIT_S = 120.0
"""How long a kernel waits for a peer's statistics, which may be late because its host compiles or loads.

After that the loss is NaN, and the next call raises, as does every later call: the launches of the ranks no longer
correspond.
"""


class Workspace:
    """Memory of the exchange on one GPU. `PeerWorkspace` holds memory that several ranks can write to."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.control = torch.zeros(2, dtype=torch.int32, device=device)
        """The epoch, and how many programs are done."""
        self.failed = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        """Set by a kernel whose wait passed its limit. It lies in host memory, to be read without synchronisation."""
        self._failure = ctypes.c_int32.from_address(self.failed.data_ptr())
        """The same number. Reading it does not pass torch's dispatcher."""
        self.words = torch.empty(0, dtype=torch.int64, device=device)
        self.peers = self.words
        """(world size,) int64: addresses of all ranks' words; unused on one rank."""
        self.half = 0
        """Words of one parity."""

    def enter(self) -> None:
        """Check before each launch. Raises RuntimeError if the wait of an earlier launch passed its limit."""
        if self._failure.value:
            raise RuntimeError(
                f"an earlier entropy_loss waited {WAIT_LIMIT_S:.0f} s in vain for the statistics of another rank, "
                "which died, did not call it, or was kept from it by another stream's collective (then say "
                "exchange='nccl'): its loss is NaN, and this group can exchange no more"
            )

    def reserve(self, words: int) -> None:
        """Make room for `words` words of one parity. New memory is filled with zeros; no launch has the epoch 0."""
        if words > self.half:
            half = next_power_of_2(words)
            self._allocate(half)
            self.half = half

    def _allocate(self, half: int) -> None:
        self.words = torch.zeros(2 * half, dtype=torch.int64, device=self.device)
        self.peers = self.words


@functools.cache
def _local_workspace(device: torch.device, stream: int) -> Workspace:
    return Workspace(device)


def local_workspace(device: torch.device) -> Workspace:
    """Return the workspace of the current stream, for a vocabulary that one rank holds. Streams' launches may overlap.

    All captured graphs share one more workspace, allocated before the first capture: memory allocated in a capture
    belongs to the graph. So two graphs with this kernel must not be replayed at the same time, as with the workspaces
    of cuBLAS.
    """
    captured = _local_workspace(device, -1)
    if torch.cuda.is_current_stream_capturing():
        return captured
    return _local_workspace(device, stream_of(device))


def stream_of(device: torch.device) -> int:
    """Return the handle of the current stream as Triton gets it: a torch.cuda.Stream takes ten times as long."""
    return int(triton.runtime.driver.active.get_current_stream(device.index))
