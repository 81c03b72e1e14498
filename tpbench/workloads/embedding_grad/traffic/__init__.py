"""Bytes that exchanges send, the rates of the links, and the density at which the dense exchange becomes faster.

The modules, in the order of a first reading: `formulas` of the bytes, `counted_collectives`, `link_rates`, the
predicted and measured `crossover`, and `crossover_study` with its `density_times`.
"""
