"""Exchanges of the gradient: the dense ones, the sparse ones, and the choice between them.

The modules, in the order of a first reading: `base` has the interface, `dense` the dense collectives, `sparse` the
common parts of `all_to_all`, `all_gather`, `sparse_all_reduce` and `symmetric`, and `auto` chooses in each step.
"""
