"""Predict the time and memory of problems that were not measured, from rows. Nothing here imports torch.

The modules, in the order of a first reading:

- Command: `command` is `scripts/predict.py`, `whole_numbers` reads its sizes, and `render` prints the answer.
- Model: `cells` reads what was measured, `fit` fits the terms of a workload's cost model to it, and `model` adds the
  errors on cells that were left out. An `estimate` is a number with such an error. `validation` prints these errors.
- Answer: `target` is the GPU in question, `memory` says whether a problem fits, and `first_sentence` begins the answer.
- Others: `oom` warns a sweep of cells that will run out of memory, `picture` draws how many tokens fit.
"""
