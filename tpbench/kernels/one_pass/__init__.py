"""The entropy loss in one kernel that reads each logit once.

`plan` decides whether a kernel can do a call and chooses its constants, `launch` queues it, and `workspace` holds the
memory through which ranks exchange. `kernel` and `whole_row_kernel` are the kernels, the other modules their helpers.
"""
