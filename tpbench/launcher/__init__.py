"""Hydra's launcher: it plans the cells of a sweep, runs each with torchrun, and stores one row for each. No torch here.

Begin with `sweep`, which has Hydra's plugins, then read `planning`, `attempt`, and `host` or `slurm`, which run cells.
"""
