"""Cells as Slurm jobs, through submitit: one array per combination of resources, and one torchrun per node of a job.

The modules, in the order of a first reading:

- Before: `settings` are the user's options. `partition` is the target of the plan. `layout` places jobs on nodes and in
  arrays.
- Sweep: `runner` submits the cells and waits for them. `cluster` has Slurm's commands.
- Node: `node` is what a job runs on each node.
- After: `submitted` knows which job runs an attempt and how it ended. `collect` is `scripts/collect.py`.
"""
