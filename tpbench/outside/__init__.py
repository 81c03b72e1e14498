"""Variants from outside this package: a function in a user's file, or in an installed package.

The launcher parses such a file and never runs it. Only the ranks of a sweep whose command line names the file load it.
"""
