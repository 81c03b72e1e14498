"""What a cell that was not measured would take, from those that were. Knows no torch."""
