"""Rows: one for every cell of a sweep, each a Parquet file of its own. Nothing here imports torch.

The modules, in the order of a first reading:

- Columns: `schema` has those of every row and those of workloads.
- Writing: `write` stores one row, durable or not at all.
- Reading: `row_files` finds and checks files, and `read` has `tpbench.load`, with the columns that no file has, or
  that a file may lack.
- Meaning: `current_rows` chooses the row that holds for a cell.
- Merging: `compact` makes one file of many, and deletes or copies rows.
"""
