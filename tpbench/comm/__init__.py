"""GPU communication and tensor-parallel linears that workloads share.

The modules, in the order of a first reading:

- `collectives` of tensors, tokens and Python objects, with gradients, and NCCL's windows;
- `parallel_linears`: column- and row-parallel products under a schedule;
- `symmetric_buffers` for copies from and to peers, with signals that order the copies.
"""
