"""Sharding of a model over tensor-parallel ranks: what each rank has, and the sharded layers that compute with it.

The modules, in the order of a first reading: `styles` without a model, the `plan` of a model, `by_modules` with
`sequence_parallel`, and `by_dtensor`.
"""
