"""Measurement of one cell on one rank: clocks, stop rule, interleaving, statistics, memory and machine facts.

Begin with `run`, which measures a `session`, then read the `timers`, `chained`, the `stop_rules`, and the guards
against stale results in `audit`.
"""
