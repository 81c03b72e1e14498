"""When the host bounds an iteration. Measurements and reports share this rule, so that nothing here imports torch."""

from __future__ import annotations

from typing import Any

IDLE_SHARE = 0.2
"""An iteration is bound by the host if the device is idle for more than this share of it."""


def is_host_bound(idle_share: Any) -> Any:
    """Return whether the host bounds an iteration, for one idle share or for each of a pandas series."""
    return idle_share > IDLE_SHARE
