"""`scripts/report.py gallery`: a static site that compares the rows of several machines."""
