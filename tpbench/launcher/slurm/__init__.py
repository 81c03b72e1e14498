"""Cells as Slurm jobs, through submitit: one array per combination of resources, and one cell, or a list, per job.

The modules, in the order of a first reading:

- `cluster` has the user's settings of jobs and Slurm's commands.
- `layout` has the partition that cells are planned for, and places jobs on nodes.
- `runner` submits the cells of a sweep and waits for them. `node` is what a job runs on each node.
- `submitted` knows which job runs an attempt and how it ended. It is also `scripts/collect.py`.
"""
