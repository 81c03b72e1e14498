"""Hydra's launcher: it plans the cells of a sweep, runs each with torchrun, and stores one row for each. No torch here.

The modules, in the order of a first reading:

- Entry: `plugin` registers the launchers with Hydra. It composes and plans the cells, and runs them with `sweep`, which
  tries failed ones again. `options` are those of a whole sweep, and `display` shows its progress.
- `command_line`: `rewrites` and `checks` work before Hydra does, with the parser of `grammar` and the `limits`.
  `model_ids` are names of models, `outside_variants` finds functions in users' files, `original_arguments` keeps the
  line as the user typed it, and `folder_error` explains errors of the output folder.
- `planning`: `plan` makes cells of composed configurations and says why a machine cannot run one. `forecast` tells how
  long a cell takes, and `resume` which cells of a resumed sweep run.
- A cell: `attempt` is one try at it, with its row. `failure` describes a job without a result. `claims` keep two sweeps
  from running the same cell, and store results of sweeps that were killed.
- `host` runs attempts here, and `slurm` as Slurm jobs. `torchrun` has the command and the environment of one or many
  attempts, `process` supervises what was started, and `interrupts` notes the signals that end a sweep.
- `leases` are the devices of a torchrun: the best connected ones of those that `devices` lists.
"""
