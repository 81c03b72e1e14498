"""The training loop, which all variants share, and a trainer for each variant.

The modules, in the order of a first reading: `trainer`, `fsdp`, `autotp`, and `measured_step`.
"""
