"""Training steps of a decoder-only transformer with several implementations of tensor and data parallelism.

Every variant trains the same model, from the same bits of initial weights, on the same batches with AdamW. A step is
`accumulate` micro-batches of `batch_size` sequences for each of dp_size replicas, then one update. The ranks of a
replica have the same batch. Replicas have different ones.

The modules, in the order of a first reading:

- Job: `problem` has the fields, `variants` a function for each variant, `workload` the columns and the report's layout.
- Rank: `bench` is the session of a cell. `trainer` is the interface of a variant, with a trainer for plain torch.
- Variants: `autotp` with `deepspeed_configuration` and `deepspeed_layers`; `fsdp` for fsdp, fsdp_dtensor,
  fsdp_dtensor_async (with `reshape_pass`) and dtensor_tp; `ddp`.
- Sharding over tensor-parallel ranks: `styles` names the ways to shard a module. `sharding_plan` gives each module of a
  model its style. `sharding_by_modules` applies them with tpbench's own `sharded_modules` and `sequence_parallel`,
  `sharding_by_dtensor` with torch's parallelize_module. `key_value_heads` gives each rank its heads.
  `plan_requirements` and `sharding_check` refuse what a variant cannot shard.
- Model: `models` builds it from `model_configuration`, with `norms` and with `weights` from the seed. `decoder_parts`
  finds its parts. `resolve`, `model_folder` and `config_json` find its sizes. `attention`, `sliding_window` and `masks`
  set its attention.
- Step: `batches`, `losses` with `logits_change`, `loss_scale`, `gradients`, `step_graph`.
- Correctness: `oracle` chooses a `reference`, which `single_process` computes. `run_audit` and `later_reference` are
  for variants from outside this package. `limits` are the tolerances.
- Counts without torch: `sizes`, `block_styles`, `memory_estimate`, `communicated_bytes`, `plan_bytes`.
- Results: `throughput`, `phases`, `phase_times`, `profiling`, `progress`, `json_document`, `agreement_study`.
"""

from tpbench.workloads.train_step import variants as variants
from tpbench.workloads.train_step.problem import TrainStep as TrainStep
from tpbench.workloads.train_step.workload import WORKLOAD as WORKLOAD
