"""`scripts/report.py gallery`: a static site that compares the rows of several machines.

The modules, in the order of a first reading: `command` reads each `entry`, `admission` refuses rows that are not
plausible, `winners` are the fastest variants, and `site` writes the files.
"""
