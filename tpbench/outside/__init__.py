"""Variants from outside this package: a function in a user's file, or in an installed package.

The launcher parses such a file and never runs it. Only the ranks of a sweep whose command line names the file load it.
The modules, in the order of a first reading:

- `declaration` is the decorator `tpbench.api.variant`.
- `source` reads a file without running it. `installed` finds entry points of installed packages.
- `variant` is the function that was found, and how a rank loads it.
"""
