"""Hydra's launcher: it plans the cells of a sweep, runs each with torchrun, and stores one row for each. No torch here.

Begin with `sweep`, which has Hydra's plugins. Then read `planning`, `attempt`, and `runner`, whose interface `host` and
`slurm` implement. The docstring of `attempt` says what is on disk while a cell runs, and who reads it.
"""
