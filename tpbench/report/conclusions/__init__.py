"""Conclusions from rows: the fastest variant of each problem, and reasons to doubt it."""
