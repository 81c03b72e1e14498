"""Schedules that overlap a product and its collective: `ring`, `copy_engine` (with `local_copy`) and `symm_mem`.

Their interface and the plain schedules are in `tpbench.comm.parallel_linears`.
"""
