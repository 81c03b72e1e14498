"""The life of a rank: process group, workload, measurement, result. No Hydra, no Arrow and no data frames here.

The modules, in the order of a first reading:

- Rank: `rank` runs one task from its start to its result. `context` has its device and process groups, and
  `error_location` the line of an error.
- Start: `torchrun` is torch's own, with the exit codes of failed ranks in a file. `rendezvous` is where ranks meet.
  `imports` makes the start short.
- Reuse: `server` is a rank that stays for many tasks. `reuse` decides whether a process may run another task.
"""
