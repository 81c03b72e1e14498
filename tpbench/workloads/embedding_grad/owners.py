"""Who owns which rows of the table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Owners:
    """Consecutive rows to each rank, the same number; the table is padded at its end to make that so."""

    table_rows: int
    world_size: int

    @property
    def rows_each(self) -> int:
        """Rows of a rank, padding included."""
        return -(-self.table_rows // self.world_size)

    @property
    def padded_rows(self) -> int:
        """Rows of the padded table."""
        return self.rows_each * self.world_size

    def first(self, rank: int) -> int:
        """The first row of a rank."""
        return rank * self.rows_each

    def held(self, rank: int) -> int:
        """Rows of a rank that are the table's: fewer, or none, on the last ranks."""
        return max(0, min(self.rows_each, self.table_rows - self.first(rank)))

    @property
    def bounds(self) -> list[int]:
        """Where each rank's rows begin, and where the last one's end: `world_size + 1` numbers."""
        return [self.first(rank) for rank in range(self.world_size + 1)]
