"""Cells as Slurm jobs, through submitit: one array per combination of resources, and one torchrun per node of a job.

The modules, in the order of a first reading:

- Before: `settings` are the user's options. `partition` is the target of the plan, `layout` places ranks on nodes.
- Sweep: `runner` submits the cells in the arrays of `arrays`, and waits for them. `cluster` has Slurm's commands.
- Node: `task` is what a job runs on each node. `interface` finds the network interface between nodes.
- After: `submitted` knows which job runs a cell and how it ended. `collect` is `scripts/collect.py`.
"""
