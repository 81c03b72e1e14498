"""Rows: one for every cell of a sweep, each a Parquet file of its own. Nothing here imports torch.

`schema` has the columns. `write` stores one row, durable or not at all. `row_files` finds and checks files, and `read`
has `tpbench.load`. `current_rows` chooses the row that holds for a cell, and `compact` merges, deletes or copies rows.
"""
