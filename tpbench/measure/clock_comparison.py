"""Compare wall time and device time: the events must not miss work.

Both events are recorded on the current stream. Work on another stream is missing in the device time if it does not wait
for the current stream first, or if the current stream does not wait for it last. The wall clock waits for the whole
device.
"""

from __future__ import annotations

import numpy as np

from tpbench.measure.columns import Samples

LONGER_WAIT, WAIT_MS = 2.0, 0.1
"""The host may wait for the device for `LONGER_WAIT` times the device time, and `WAIT_MS` more. In 74 honest cells of
0.008 to 8 ms on one H200, with and without graphs, it waited at most 0.008 ms longer than the device time."""

LATER_SHARE, LATER_MS = 0.02, 1.0
"""The device may become idle later than the end event, by `LATER_SHARE` of the device time and `LATER_MS`. In the
repository's 69 rows of training steps on two and four H200s, which take 7 to 1000 ms, the median difference is at most
0.21 ms."""


def long_wait_reason(waits: Samples, on_device: Samples) -> str | None:
    """Return that the host waits longer for the device than an iteration takes on it, or None.

    `waits`: from the return of the step until the device is idle, by wall clock. All launches are queued by then, so
    that an honest device needs at most the time of a whole iteration, however slow the host is. The rank whose step
    returns last waits for no other rank's launches: hence the shortest wait of each iteration counts.
    """
    wait_ms = float(np.median([each.min() for each in waits]))
    device_ms = float(np.median([each.max() for each in on_device]))
    if wait_ms <= LONGER_WAIT * device_ms + WAIT_MS:
        return None
    return _not_joined(f"the device works for {wait_ms:.3g} ms after the step has returned", device_ms)


def late_idle_reason(wall: Samples, on_device: Samples) -> str | None:
    """Return that the device works after the end event of an iteration, or None.

    Both clocks time the same iterations of an idle device, so that the start event is recorded at once. The wall time
    is then longer by the work after the end event. An honest host delays both ends alike.
    """
    later_ms = float(np.max(np.median([one - other for one, other in zip(wall, on_device, strict=True)], axis=0)))
    device_ms = float(np.median([each.max() for each in on_device]))
    if later_ms <= LATER_SHARE * device_ms + LATER_MS:
        return None
    return _not_joined(f"the device works for {later_ms:.3g} ms after the end event", device_ms)


def _not_joined(finding: str, device_ms: float) -> str:
    return (
        f"{finding}, and {device_ms:.3g} ms between the events: they miss work on another stream. Let that stream wait "
        "for the current one before it begins, and let the current stream wait for it before the step returns"
    )
