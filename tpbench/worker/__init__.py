"""The life of a rank: process group, workload, measurement, result. No Hydra, no Arrow and no data frames here.

The modules, in the order of a first reading:

- Messages, which the launcher shares: `task` tells the ranks what to run, with the result that a row needs.
- Start, which the launcher shares: `start` has the names by which processes of a job meet and end.
- Rank: `rank` runs tasks from their start to their results. `process` has its device and what it resets between tasks.
- Agent: `torchrun` is torch's own, with the exit codes of failed ranks in a file. `rendezvous` is where ranks meet.

The shared modules import neither torch nor Arrow, so that a rank starts fast and can report that its memory ran out.
"""
