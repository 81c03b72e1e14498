"""GPU communication and tensor-parallel linears that workloads share.

The modules, in the order of a first reading:

- `collectives` of tensors and Python objects;
- `parallel_linears`: column- and row-parallel products under a schedule;
- `row_exchange` of tokens and columns, with gradients;
- `symmetric_buffers` for copies from and to peers, and `signals` that order the copies;
- `shared_memory_all_gather` for a few numbers between processes of one machine.
"""
