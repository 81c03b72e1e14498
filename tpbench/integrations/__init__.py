"""The kernels in other training codes, one module for each code. Importing a module replaces nothing.

`transformers.patched()`, `trl.patch(trainer)`, `megatron.patched()` and `verl.patched()` put the kernels in the place
of a code's own loss. They return a `Patch`, which takes the kernels out again. `torchtitan.EntropyLoss` is a loss
that a configuration names. `patches` contains what the modules share, and `trl_objectives` TRL's losses as objectives.
"""
