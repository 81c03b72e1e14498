"""Variants and workloads from outside this package, in a user's file.

The launcher reads the text of such a file and never runs it: `source`. Only a process that describes the file to the
launcher, and the ranks of a sweep whose command line names the file, run it: `loading`. `describe` is that process.
`variant` is what the launcher then knows, and how a rank gets the code.
"""
