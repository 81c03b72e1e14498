"""The types of variants of the entropy loss: `my_fn(problem: EntropyLoss, shard: Shard) -> Step`."""

from tpbench.outside.source import variant as variant
from tpbench.workloads.entropy_loss.interface import Output as Output
from tpbench.workloads.entropy_loss.interface import Shard as Shard
from tpbench.workloads.entropy_loss.interface import Step as Step
from tpbench.workloads.entropy_loss.problem import EntropyLoss as EntropyLoss
from tpbench.workloads.vocabulary import IGNORED as IGNORED
