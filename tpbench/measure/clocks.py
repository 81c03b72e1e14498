"""The clocks of a row: what each one times, and which columns it fills. The schema and the reports follow from them."""

from dataclasses import dataclass

from tpbench.columns import Column

LATE_MS = (0.0, 0.05, 0.25, 1.0)
"""Delays of one rank that `late=true` measures."""

STATISTICS = {
    "": "median",
    "p5_": "5th percentile",
    "p95_": "95th percentile",
    "min_": "minimum",
    "ci_low_": "lower end of the median's 95% confidence interval",
    "ci_high_": "upper end of the median's 95% confidence interval",
}
"""The statistics of a clock's samples, by the part of a column's name before the unit."""


@dataclass(frozen=True)
class Clock:
    """A way to time an iteration, and the columns of its result."""

    name: str
    column: str
    """Column of the median."""
    meaning: str
    title: str
    """Heading in tables and pictures."""
    prefix: str = ""
    """Beginning of the names of its columns with several numbers."""

    def statistic(self, part: str) -> str:
        """Return the column of a statistic, such as `p5_`."""
        stem, _, unit = self.column.rpartition("_")
        return f"{stem}_{part}{unit}"

    @property
    def interval(self) -> tuple[str, str]:
        """The columns with the ends of the median's 95% confidence interval."""
        return self.statistic("ci_low_"), self.statistic("ci_high_")

    @property
    def samples(self) -> str:
        """The column with the time of every iteration, on the slowest rank."""
        return f"{self.prefix}samples_ms"

    @property
    def rounds(self) -> str:
        """The column with the median of each round of an interleaved cell."""
        return f"{self.prefix}round_ms"


WALL = Clock("wall", "time_ms", "wall time of an iteration", "Wall time")
"""From the barrier of all ranks to the end of the last rank."""

DEVICE = Clock(
    "device", "device_ms", "device time of an iteration on the slowest rank", "Device time", prefix="device_"
)
"""The same region by device events, with launches queued ahead. Null on CPUs."""

CHAINED = Clock(
    "chained",
    "chained_ms",
    "wall time of an iteration back to back with others, in a loop of them alone, on the slowest rank",
    "Time in a loop",
    prefix="chained_",
)
"""Blocks of iterations without a barrier or a flush, divided by their number. If it is null, not_chained says why."""

TIMED = (WALL, DEVICE, CHAINED)

DECIDING = (DEVICE, WALL)
"""The clocks that may decide which cell is fastest, the leading one first."""


def statistics_columns() -> tuple[Column, ...]:
    """Return the columns of all statistics."""
    return tuple(
        Column(clock.statistic(part), float, f"{clock.meaning}, {statistic}", better=None if "ci_" in part else -1)
        for clock in TIMED
        for part, statistic in STATISTICS.items()
    )


def sample_columns() -> tuple[Column, ...]:
    """Return the columns with several numbers, which are samples, rounds and delays."""
    rounds = "median of each round of an interleaved cell"
    delays = ", ".join(f"{delay:g}" for delay in LATE_MS)
    products = "time of three products on another stream of the other ranks, for each of these delays"
    return (
        *(Column(clock.samples, list, f"{clock.meaning}, every sample") for clock in TIMED),
        *(Column(clock.rounds, list, f"{clock.meaning}, {rounds}") for clock in TIMED),
        # The cost of a late rank for the others, and for other work on their GPUs. Null without `late=true`.
        Column("late_ms", list, f"time of the other ranks if one starts {delays} ms late, minus that delay"),
        Column("beside_ms", list, products),
        Column("beside_alone_ms", float, "time of these products without the variant"),
    )
