"""Schedules of a product and its collective: one after the other, or overlapped.

The modules, in the order of a first reading: `base` has the interface and the plain schedules, and the overlapped ones
are `ring`, `copy_engine` (with `local_copy`) and `symm_mem`.
"""
