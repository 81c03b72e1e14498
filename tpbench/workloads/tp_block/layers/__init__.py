"""Tensor-parallel layers, and the transformer block that is built from them.

The modules, in the order of a first reading: `sharded_linear` says which part of a weight a rank has,
`linear_operations` and `autograd` compute such a linear under a schedule, `parallel` has the layers, and `block` builds
a block from them, with `rotary` embeddings.
"""
