"""Rows: one for every cell of a sweep, each a Parquet file of its own. Knows no torch."""
