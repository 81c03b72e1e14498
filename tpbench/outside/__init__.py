"""Variants and workloads from outside this package, in a user's file.

The launcher parses such a file and never runs it. Only the ranks of a sweep whose command line names the file load it.
"""
