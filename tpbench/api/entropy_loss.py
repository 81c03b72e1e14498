"""The types of variants of the entropy loss: `my_fn(problem: EntropyLoss, shard: Shard) -> Step`."""

from tpbench.outside.loading import variant as variant
from tpbench.workloads.entropy_loss.inputs import Output as Output
from tpbench.workloads.entropy_loss.inputs import Shard as Shard
from tpbench.workloads.entropy_loss.inputs import Step as Step
from tpbench.workloads.entropy_loss.problem import EntropyLoss as EntropyLoss
from tpbench.workloads.sizes import IGNORED as IGNORED
