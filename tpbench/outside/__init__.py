"""Variants and workloads from outside this package, in a user's file.

The launcher parses such a file and never runs it. Only the ranks of a sweep whose command line names the file load it.
`source` has the decorator `tpbench.api.variant` and reads a file without running it. `variant` is the function that was
found, and how a rank loads it.
"""
