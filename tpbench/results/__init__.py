"""Rows: one for every cell of a sweep, each a Parquet file of its own. Nothing here imports torch.

The modules, in the order of a first reading:

- Columns: `columns` are those of every row. `schema` adds those of workloads, and `document` writes them to
  outputs/SCHEMA.md.
- Writing: `write` stores one row, durable or not at all. `checksum` makes a changed bit visible.
- Reading: `find` lists the files, `files` reads each, `combine_tables` makes one table of them, and `read` has
  `tpbench.load`. `stored_jobs` gives rows their keys and the defaults of
  fields that they lack, `suspicious` warns of rows that could hide others.
- Meaning: `label` is a variant with its options. `current_rows` chooses the row that holds for a cell.
- Merging: `compact` makes one file of many, and `merged_index` knows what it merged.
- Text and values: `printable` makes any text safe to print, `plain` makes dictionaries of a frame.
"""
