"""The training loop, which all variants share: batches, loss, gradients and update.

The modules, in the order of a first reading: `batches`, `trainer` with `losses`, `gradients` and `loss_scale`, `phases`
of a step, and `step_graph`.
"""
