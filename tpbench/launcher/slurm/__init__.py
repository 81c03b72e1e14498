"""Cells as Slurm jobs, through submitit: an array for each shape of resources, a torchrun on each node of a job."""
