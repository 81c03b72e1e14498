"""Predict the time and memory of problems that were not measured, from rows. Nothing here imports torch.

The modules, in the order of a first reading:

- `command` is `tpbench predict`, and `answer` prints what it answers.
- `cells` reads what was measured, and `model` fits the terms of the entropy loss's cost model to it.
- `target` is the GPU in question.
"""
