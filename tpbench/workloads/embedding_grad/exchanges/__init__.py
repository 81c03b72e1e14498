"""Exchanges of the gradient: the dense ones, the sparse ones, and the choice between them."""
