"""Training steps of a decoder-only transformer with several implementations of tensor and data parallelism.

Every variant trains the same model, from the same bits of initial weights, on the same batches with AdamW. A step is
`accumulate` micro-batches of `batch_size` sequences for each of dp_size replicas, then one update. The ranks of a
replica have the same batch. Replicas have different ones.

The modules, in the order of a first reading:

- Job: `problem` has the fields, and `resolve` completes its model. `variants` has a function for each variant,
  `workload` the columns and the report's layout.
- Rank: `bench` is the session of a cell. `oracle` chooses the reference of a run, and `limits` are the tolerances.
- `model`: the model of the transformers package, with its configuration, sizes, weights and inputs.
- `sharding`: the plan by which tensor-parallel ranks share a model, and the sharded layers.
- `training`: the training loop, and `trainer`, the interface of a variant.
- `implementations`: a trainer for each variant, by DeepSpeed AutoTP, FSDP2 or DDP.
- `estimates`: memory, communicated bytes and FLOPs of a rank, before anything runs.
- `correctness`: the same training by one process, and the comparison with it.
- `results`: speed, times of phases, profile and progress of a run; documents and studies from its rows.

Imports go in one direction. `model` is below `sharding` and `training`, which do not import each other. The other
folders are above these, and do not import each other either. All folders import `problem`.
"""

from tpbench.workloads.train_step import variants as variants
from tpbench.workloads.train_step.problem import TrainStep as TrainStep
from tpbench.workloads.train_step.workload import WORKLOAD as WORKLOAD
