"""Choice of the free devices with the most bandwidth among themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_COMPARED_SETS = 20_000
"""Most sets of devices that are compared. All sets of sixteen GPUs take less than a second."""


@dataclass(frozen=True)
class Device:
    """A GPU, or a CPU core if jobs run side by side on a CPU."""

    name: str
    """Name of the lock file. It is the same for all users of this host."""
    visible: str
    """Name in CUDA_VISIBLE_DEVICES, or number of the core."""


def choose(free: Sequence[Device], count: int, links: Mapping[frozenset[str], float]) -> tuple[Device, ...]:
    """Return the `count` devices with the most bandwidth among themselves.

    Ties: the best bandwidth among the devices that remain, then the first devices. `links` has the weight of each
    pair of device names.
    """
    weights = {_weight(links, a, b) for a, b in itertools.combinations(free, 2)}
    if len(weights) < 2:  # cores, or GPUs on one switch
        return tuple(free[:count])

    def bandwidth(devices: Sequence[Device]) -> float:
        return sum(_weight(links, a, b) for a, b in itertools.combinations(devices, 2))

    def rank(chosen: tuple[Device, ...]) -> tuple[float, float]:
        return bandwidth(chosen), bandwidth([each for each in free if each not in chosen])

    def grow(first: Device) -> tuple[Device, ...]:
        """Add the best connected device to the set until the set is complete."""
        chosen = [first]
        while len(chosen) < count:
            rest = [each for each in free if each not in chosen]
            chosen.append(max(rest, key=lambda each: bandwidth([*chosen, each])))
        return tuple(each for each in free if each in chosen)

    if math.comb(len(free), count) <= MAX_COMPARED_SETS:
        return max(itertools.combinations(free, count), key=rank)
    return max(map(grow, free), key=rank)


def _weight(links: Mapping[frozenset[str], float], a: Device, b: Device) -> float:
    return links.get(frozenset((a.name, b.name)), 0.0)
