"""Comparison of two sets of rows: faster, slower, failing, or not comparable.

`command` reads the two sides and prints the result. `pairs` pairs equal cells and says under which conditions their
rows were measured. `changes` gives each pair its verdict.
"""
