"""Run a block on a rank.

The modules, in the order of a first reading:

- `layers`: tensor-parallel layers, and the block that is built from them.
- `torch_schedules`, `copy_engine`: schedules that overlap products and collectives. The plain ones, and the interface,
  are in `tpbench.comm.parallel_linears`. A new schedule is a class here, a function in `variants` and a line in
  `autotune.available_schedules`.
- `prepared`: what a variant returns, a block that runs eagerly, compiled or as CUDA graphs.
- `autotune`: trials of schedules for block_auto.
- `measurements` beside the time of a step.
"""
