"""Measurement of one cell on one rank: clocks, stop rule, interleaving, statistics, memory and machine facts."""
