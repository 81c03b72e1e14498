"""Cells as Slurm jobs, through submitit: one array per combination of resources, and one cell, or a list, per job.

- `cluster` has the user's settings, Slurm's commands, and the partition that cells are planned for.
- `runner` submits the cells of a sweep and waits for them. It also has what a job runs on each node.
- `submitted` knows which job runs an attempt and how it ended. It is also `tpbench collect`.
"""
