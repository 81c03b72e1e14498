"""The check of a run against the same training by one process.

The modules, in the order of a first reading: `single_process` computes a `reference`; `later_reference` and `run_audit`
are for variants from outside this package.
"""
