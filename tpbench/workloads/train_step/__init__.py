"""Training steps of a decoder-only transformer with several implementations of tensor and data parallelism.

Every variant trains the same model, from the same bits of initial weights, on the same batches with AdamW. A step is
`accumulate` micro-batches of `batch_size` sequences for each of dp_size replicas, then one update. The ranks of a
replica have the same batch. Replicas have different ones.

The modules, in the order of a first reading:

- Job: `problem` has the fields. `variants` has a function for each variant, `workload` the columns and the report's
  layout.
- Rank: `bench` is the session of a cell. `oracle` computes the reference of a run and compares.
- `model`: the model of the transformers package, with its configuration, sizes, weights and inputs.
- `sharding`: the plan by which tensor-parallel ranks share a model, and the sharded layers.
- `training`: the training loop, the interface of a variant, and a trainer for each variant.
- `estimates`: memory, communicated bytes and FLOPs of a rank, before anything runs.
- `documents`: what a report makes of rows.

Imports go in one direction: `model` is below `sharding`, which is below `training`.
"""

from tpbench.workloads.train_step import variants as variants
from tpbench.workloads.train_step.problem import TrainStep as TrainStep
from tpbench.workloads.train_step.workload import WORKLOAD as WORKLOAD
