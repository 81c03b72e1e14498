"""One transformer block under tensor and sequence parallelism, with and without overlapped communication.

Between layers each of p ranks holds tokens / p rows of the activations. Inside attention and the MLP it holds all rows
and 1/p of the columns. Every pair of linears therefore costs an all-gather before the first (column-parallel) one and a
reduce-scatter after the second (row-parallel) one. The backward pass swaps the two. All variants compute the same; they
differ in when products and communication run: one after the other, or in chunks beside each other.
"""

from tpbench.workloads.tp_block import variants as variants
from tpbench.workloads.tp_block.problem import WORKLOAD as WORKLOAD
from tpbench.workloads.tp_block.problem import TpBlock as TpBlock
