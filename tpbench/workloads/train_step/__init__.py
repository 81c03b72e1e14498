"""Some steps of training a decoder-only transformer, under several implementations of tensor and data parallelism.

Every variant trains the same model (the same bits of the same initial weights) on the same batches with AdamW; a step
is `accumulate` micro-batches of `batch_size` sequences for each of dp_size replicas, then one update. The ranks of a
replica see the same batch, replicas different ones.
"""

from tpbench.workloads.train_step import variants as variants
from tpbench.workloads.train_step.problem import TrainStep as TrainStep
from tpbench.workloads.train_step.workload import WORKLOAD as WORKLOAD
