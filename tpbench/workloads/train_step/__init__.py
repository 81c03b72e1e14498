"""Training steps of a decoder-only transformer with several implementations of tensor and data parallelism.

Every variant trains the same model, from the same bits of initial weights, on the same batches with AdamW. A step is
`accumulate` micro-batches of `batch_size` sequences for each of dp_size replicas, then one update. The ranks of a
replica have the same batch. Replicas have different ones.

`problem`, `workload` and `variants` declare it, and `bench` is the session of a cell on a rank. `oracle` computes the
reference of a run and compares. `estimates` counts before anything runs, and `documents` makes of rows what a report
shows. Folders import in one direction: `model` is below `sharding`, which is below `training`.
"""

from tpbench.workloads.train_step import variants as variants
from tpbench.workloads.train_step.problem import TrainStep as TrainStep
from tpbench.workloads.train_step.workload import WORKLOAD as WORKLOAD
