"""Operations on rows of the table: the search for touched rows, and the gather, push and merge of rows.

The modules, in the order of a first reading: `touched_rows` searches on the CPU (with `pinned_ring`), `device_search`
on the GPU (with `replayed`), `merge` adds received rows, and the Triton kernels are `search_kernel`, `gather_kernel`,
`push_kernel` and `merge_kernel`.
"""
