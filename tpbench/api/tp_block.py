"""The types of variants of the transformer block, and its layers, which need no workload.

A variant is a function `my_fn(problem: TpBlock, context: BlockContext) -> PreparedBlock`.
"""

from tpbench.comm.parallel_linears import Pending as Pending
from tpbench.comm.parallel_linears import Schedule as Schedule
from tpbench.outside.loading import variant as variant
from tpbench.workloads.tp_block.execution.layers import Attention as Attention
from tpbench.workloads.tp_block.execution.layers import ColumnParallelLinear as ColumnParallelLinear
from tpbench.workloads.tp_block.execution.layers import Mlp as Mlp
from tpbench.workloads.tp_block.execution.layers import RMSNorm as RMSNorm
from tpbench.workloads.tp_block.execution.layers import RowParallelLinear as RowParallelLinear
from tpbench.workloads.tp_block.execution.layers import TransformerBlock as TransformerBlock
from tpbench.workloads.tp_block.execution.prepared import BlockContext as BlockContext
from tpbench.workloads.tp_block.execution.prepared import PreparedBlock as PreparedBlock
from tpbench.workloads.tp_block.execution.prepared import prepare as prepare
from tpbench.workloads.tp_block.problem import TpBlock as TpBlock

PlainSchedule = Schedule
"""Another name of `Schedule`, which runs products in one piece unless a child overrides them."""
