"""Sharding of a model over tensor-parallel ranks: what each rank has, and the sharded layers that compute with it.

The modules, in the order of a first reading: `styles`, the `plan` of a model, `by_modules` with `sharded_modules` and
`sequence_parallel`, `by_dtensor`, `block_styles` and `key_value_heads` without a model, `plan_requirements`, `check`.
"""
