"""The types of variants of the linear loss: `my_fn(problem: LinearLoss, shard: Shard) -> Step`."""

from tpbench.outside.loading import variant as variant
from tpbench.workloads.linear_loss.inputs import Output as Output
from tpbench.workloads.linear_loss.inputs import Shard as Shard
from tpbench.workloads.linear_loss.inputs import Step as Step
from tpbench.workloads.linear_loss.problem import LinearLoss as LinearLoss
from tpbench.workloads.sizes import IGNORED as IGNORED
