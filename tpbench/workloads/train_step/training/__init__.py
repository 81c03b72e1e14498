"""The training loop, which all variants share, and a trainer for each variant.

The modules, in the order of a first reading: `trainer` with `losses`, `fsdp`, `autotp`, and `measured_step`.
"""
