"""`scripts/report.py history`: a metric over time, with the commits and packages at which it changed."""
