"""Tensor-parallel layers, and the transformer block that is built from them.

The modules, in the order of a first reading: `sharded_linear` says which part of a weight a rank has, `parallel` has
the layers, and `block` builds a block from them, with `rotary` embeddings.
"""
