"""The entropy loss in one kernel that reads each logit once.

The modules, in the order of a first reading:

- Host: `plan` decides whether a kernel can do a call and chooses its constants, with the shapes of `tiling`.
  `workspace` holds the memory through which ranks exchange. `launch` queues the kernel, with its `parameters`.
- Kernels: `kernel`, and `whole_row_kernel` for rows that fill the shared memory of a multiprocessor.
- Helpers of the kernels: `walk` goes from row to row, with the labels and counts of `rows`. `tiles` are copied and
  reduced to a `state`, the `exchange` merges states, `gradient` writes gradients, and `finish` ends a launch.
- Below them: `layouts` of threads, and instructions in `ptx`.
"""
