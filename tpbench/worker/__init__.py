"""The life of a rank: process group, workload, measurement, result. No Hydra, no Arrow and no data frames here.

The launcher shares `task` and `start`. They import neither torch nor Arrow, so that a rank starts fast and can report
that its memory ran out.
"""
