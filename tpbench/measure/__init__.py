"""Measurement of one cell on one rank. Read `run`, then `session`, `timers`, `chained`, `stop_rules` and `audit`."""
