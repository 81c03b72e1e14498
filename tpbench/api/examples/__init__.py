"""Files to start from, one for each workload: `python -m tpbench new my_loss.py --workload NAME` copies one."""
