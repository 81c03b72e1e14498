"""One transformer block under tensor and sequence parallelism, its communication plain or hidden behind the products.

Between the layers each of p ranks holds tokens / p rows of the activations; inside attention and the MLP it holds all
rows of 1/p of the columns. So every pair of linears costs an all-gather before the first (column-parallel) and a
reduce-scatter after the second (row-parallel), and the same, swapped, in the backward pass. The variants compute the
same and differ in how these are laid out in time: one after the other, or chunk by chunk beside the products.
"""

from tpbench.workloads.tp_block import variants as variants
from tpbench.workloads.tp_block.problem import WORKLOAD as WORKLOAD
from tpbench.workloads.tp_block.problem import TpBlock as TpBlock
