"""Cells as Slurm jobs, through submitit: one array per combination of resources, and one cell, or a list, per job."""
