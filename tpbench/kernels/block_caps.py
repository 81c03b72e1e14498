"""The measured block caps that block_cap="auto" stands for, by GPU, algorithm, loss and columns.

Nothing is tuned while a program runs: no timed region contains tuning, and all ranks use the same cap. The file
`block_caps.json` names the machines. `scripts/choose_block_caps.py` makes it from the rows of
`-m +experiment=block_cap_sweep`.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

import torch

from tpbench.kernels import COMPARING_LOSSES


@functools.cache
def measured_caps() -> Any:
    """Return the caps by algorithm, loss and columns of a rank: of this kind of GPU, or of the file's first one."""
    machines = json.loads((resources.files(__package__) / "block_caps.json").read_text())
    gpu_name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((on["caps"] for on in machines if on["measured_on"]["gpu_name"] == gpu_name), machines[0]["caps"])


@functools.cache
def measured_cap(algorithm: str, loss: str, share: int) -> int:
    """Return the cap of the narrowest measured width that `share` fits into, or else of the widest.

    share: columns of each rank if the vocabulary is split evenly, so that all ranks choose the same cap.
    """
    caps = measured_caps()[algorithm]["reverse_kl" if loss in COMPARING_LOSSES else loss]
    return int(caps[min(caps, key=lambda columns: (int(columns) < share, abs(int(columns) - share)))])
