"""Hydra's launcher: it plans the cells of a sweep, runs each with torchrun, and stores one row for each. No torch here.

The modules, in the order of a first reading:

- Entry: `sweep` has Hydra's plugins. It composes, plans and runs the cells. `options` are those of a whole sweep, and
  `display` shows its progress.
- `command_line` works before Hydra does: `arguments` explain mistakes and do what Hydra has no setting for, and
  `outside_choices` make variants of users' files choices of Hydra's.
- `planning`: `plan` makes cells of composed configurations and says why a machine cannot run one. `forecast` tells how
  long a cell takes, and `resume` which cells of a resumed sweep run.
- `attempt` is one try at a cell, with its row. `failure` tells why a job left no result.
- `host` runs attempts here, one or many in a `torchrun`, which supervises its processes. `slurm` runs them as Slurm
  jobs, in which `host` does the same. `interrupts` notes the signals that end a sweep.
- `devices` leases GPUs to one torchrun at a time; locks keep two sweeps from the same cell or GPU.
"""
