"""Predict the time and memory of problems that were not measured, from rows. Nothing here imports torch.

`cells` reads what was measured, and `model` fits the terms of the entropy loss's cost model to it. `target` is the GPU
in question. `command` is `tpbench predict`, whose output is made by `answer` or `validation`.
"""
