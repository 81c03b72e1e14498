"""Run a block on a rank.

The modules, in the order of a first reading: `layers` has the tensor-parallel layers and the block that is built from
them. Their products and collectives run under a schedule: the plain ones are in `tpbench.comm.parallel_linears`, the
overlapped ones are `ring`, `copy_engine` and `symm_mem`. `prepared` is what a variant returns: the block, eagerly,
compiled or as CUDA graphs. `autotune` tries schedules for block_auto. `measurements` are those beside the step's time,
and `stack` trains a stack of blocks (layers=N).
"""
