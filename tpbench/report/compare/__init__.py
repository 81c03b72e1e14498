"""Comparison of two sets of rows: faster, slower, failing, or not comparable."""
