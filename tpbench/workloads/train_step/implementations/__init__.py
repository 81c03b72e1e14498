"""Implementations of the variants: DeepSpeed AutoTP, FSDP2 with and without tensor parallelism, and DDP.

The modules, in the order of a first reading: `ddp`, `fsdp` with `reshape_pass`, and `autotp` with
`deepspeed_configuration` and `deepspeed_layers`.
"""
