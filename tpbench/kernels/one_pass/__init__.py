"""The entropy loss in one kernel that reads each logit once. `tpbench/kernels/README.md` explains the modules."""
