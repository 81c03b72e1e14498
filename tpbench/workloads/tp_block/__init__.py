"""One transformer block under tensor and sequence parallelism, with and without overlapped communication.

Between layers each of p ranks holds tokens / p rows of the activations. Inside attention and the MLP it holds all rows
and 1/p of the columns. Every pair of linears therefore costs an all-gather before the first (column-parallel) one and a
reduce-scatter after the second (row-parallel) one. The backward pass swaps the two. All variants compute the same; they
differ in when products and communication run: one after the other, or in chunks beside each other.

The modules, in the order of a first reading:

- Job: `problem` has the fields, and what a step must compute, move and send. `workload` has the columns, and the
  variants with their schedules.
- Rank: `bench` has the functions of a block, and the session of a stack that is trained (layers=N). In `execution` are
  the layers, and the schedules that overlap products and collectives. A new schedule is a class there and a variant in
  `workload`; its interface is in `tpbench.comm.parallel_linears`.
- Correctness: `inputs` makes activations and weights, and `oracle` computes in float64 and compares.
- Report: `overlap_study` says which variant to choose at which length.
"""

from tpbench.workloads.tp_block.problem import TpBlock as TpBlock
from tpbench.workloads.tp_block.workload import WORKLOAD as WORKLOAD
