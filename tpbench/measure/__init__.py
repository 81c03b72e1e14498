"""Measurement of one cell on one rank: clocks, stop rule, interleaving, statistics, memory and machine facts.

The modules, in the order of a first reading:

- Order of a measurement: `run` measures a `session`, until the `stop_rules` are met or for a fixed number of
  iterations.
- Times: `clock` has wall and device time and times parts of an iteration. `chained` times iterations back to back, and
  `late` those beside a late rank. `statistics` decides when the median is precise. `ranks` gathers the numbers of all
  ranks. `compile_time` is that of Triton and of torch.compile.
- Trust: `audit` has three guards against stale results.
- Memory and floors: `rank_memory`, and the `rates` of copies and of products.
- GPU: `cuda_graph` captures a step. `gpu` reads clocks and throttling. `gpu_trace` says from a profile what bounds
  an iteration.
- Results: `machine` describes the machine, and `kernels_version` the code of the kernels.
"""
