"""The entropy loss in one kernel that reads each logit once.

The modules, in the order of a first reading:

- Host: `launch` decides whether a kernel can do a call, chooses its constants with the shapes of `tiling`, and queues
  it. `tpbench.kernels.symmetric` holds the memory through which programs exchange.
- Kernels: `kernels`, and `shared_rows`.
- Helpers of the kernels: `rows` goes from row to row, with their `targets`. `tiles` are copied, reduced to `states`,
  and turned into gradients. The `exchange` merges states.
- Below them: `layouts` of threads, and instructions in `ptx`.
"""
