"""Cells as Slurm jobs, through submitit: one array per combination of resources, and one torchrun per node of a job."""
