"""Sharding of a model over tensor-parallel ranks: the plan, and the sharded layers that compute with it."""
