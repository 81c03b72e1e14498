"""GPU communication shared by workloads: collectives, symmetric buffers, signals, CUDA driver calls.

The modules, in the order of a first reading: `collectives` of tensors and Python objects; `symmetric_buffers` for
copies from and to peers, `signals` that order the copies, and `cuda_driver` for the calls that signals need;
`shared_memory_all_gather` for a few numbers between processes of one machine.
"""
