"""Checks of versions, replaced functions, and modules of losses that are kept, for all integrations."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import re
from typing import Any

from tpbench.kernels import EntropyLoss, LinearEntropyLoss


def check_version(package: str, oldest: str, newest: str) -> None:
    """Raise ImportError unless `package` is installed in a version from `oldest` to `newest`, which were tried."""
    advice = f"pip install '{package}>={oldest},<={newest}'"
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{package} is not installed: {advice}") from None
    if not _numbers(oldest) <= _numbers(installed) <= _numbers(newest):
        raise ImportError(
            f"{package} {installed} is installed, and tpbench was tried with {oldest} to {newest}. Others may "
            f"have other functions where tpbench replaces some: {advice}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


class Patch(contextlib.ExitStack):
    """Functions that are replaced until `undo()`, or until the end of a `with` block."""

    def replace(self, holder: Any, name: str, value: Any) -> None:
        """Replace an attribute of an object, or an entry of a dict."""
        if isinstance(holder, dict):
            self.callback(holder.__setitem__, name, holder[name])
            holder[name] = value
            return
        if name in vars(holder):
            self.callback(setattr, holder, name, vars(holder)[name])
        else:  # the class has it, not the object
            self.callback(delattr, holder, name)
        setattr(holder, name, value)

    undo = contextlib.ExitStack.close
    """Put back what was replaced. A second call changes nothing."""


@functools.lru_cache(maxsize=32)
def entropy_loss_of(**settings: Any) -> EntropyLoss:
    """Return the module with these settings. It is kept, because its first call compares the columns of ranks."""
    return EntropyLoss(**settings)


@functools.lru_cache(maxsize=32)
def linear_loss_of(**settings: Any) -> LinearEntropyLoss:
    """Return the module with these settings, as `entropy_loss_of` does."""
    return LinearEntropyLoss(**settings)


def columns_of_rank(group: Any, vocab_size: int) -> dict[str, Any]:
    """Return the settings of a vocabulary that `group` shards as DTensors are: the last parts may be less."""
    if group is None or group.size() == 1:
        return {}
    start = min(group.rank() * -(-vocab_size // group.size()), vocab_size)
    # FSDP and overlapped gradients may communicate at the same time on other streams.
    return {"group": group, "vocab_start": start, "vocab_size": vocab_size, "exchange": "yielding"}


def columns_of(weight: Any) -> dict[str, Any]:
    """Return the settings of a head's weight: empty unless it is a DTensor of which tensor-parallel ranks hold rows."""
    if not hasattr(weight, "placements") or weight.device_mesh.mesh_dim_names != ("tp",):
        return {}
    return columns_of_rank(weight.device_mesh.get_group(), len(weight)) if weight.placements[0].is_shard(0) else {}
