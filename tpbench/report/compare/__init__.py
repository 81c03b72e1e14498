"""Comparison of two sets of rows: faster, slower, failing, or not comparable.

The modules, in the order of a first reading: `command` reads the two `sides` and makes `pairs` of equal cells.
`conditions` are what the rows of a pair share. `changes` gives each pair its verdict, with the `uncertainty` of its
ratio. `render` prints the result with the sentences of `method`, and `unpaired` explains why no cell is in both.
"""
