"""Hydra's launcher: it plans the cells of a sweep, runs each with torchrun, and stores one row for each. No torch here.

The modules, in the order of a first reading:

- Entry: `plugin` registers the launchers with Hydra. It composes and plans the cells, and runs them with `sweep`, which
  tries failed ones again. `options` are those of a whole sweep, and `display` shows its progress.
- `command_line` works before Hydra does: `checks` explain mistakes, and `rewrites` do what Hydra has no setting for.
- `planning`: `plan` makes cells of composed configurations and says why a machine cannot run one. `forecast` tells how
  long a cell takes, and `resume` which cells of a resumed sweep run.
- A cell: `attempt` is one try at it, with its row. `failure` describes a job without a result.
- `host` runs attempts here, and `slurm` as Slurm jobs. Both use `torchrun`, which runs one or many attempts. `process`
  supervises what was started, and `interrupts` notes the signals that end a sweep.
- `devices` are leased to one torchrun at a time; locks keep two sweeps from the same cell or device.
"""
