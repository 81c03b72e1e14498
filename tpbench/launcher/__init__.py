"""Hydra's launcher: it plans the cells of a sweep, runs each with torchrun, and stores one row for each. No torch here.

The modules, in the order of a first reading:

- Entry: `plugin` registers the launchers with Hydra. It composes the cells with `compose`, plans and runs them.
- Command line: `override_rewrites` and `override_checks` work before Hydra does, with the parser of `override_grammar`
  and the limits of `override_limits`. `options` are those of a whole sweep, `model_ids` are names of models,
  `outside_variants` finds functions in users' files, and `original_arguments` keeps the line as the user typed it.
- Plan: `plan` makes cells of configurations. `target` says why a machine cannot run a cell, `cores` why a CPU cannot,
  and `forecast` how long a cell takes.
- Sweep: `sweep` runs the cells and tries failed ones again. `resume` decides which cells run, `locks` keep two sweeps
  from running the same cell, and `display` shows the progress.
- Cell: `attempt` is one try at a cell, `outcome` how it ended, and `row` what is stored. `failure` describes a job
  without a result. `leftovers` stores results of sweeps that were killed. `folder_error` explains errors of the output
  folder.
- This host: `host` runs cells: `cold` with a torchrun for each, `warm` with one that stays, and `interleaved` in
  rounds. `torchrun` has the command and the environment, and `process` supervises what was started.
- Devices: `devices` leases them, `device_choice` takes the best connected, and `gpus` lists those of this host.
- Cluster: `slurm` runs cells as Slurm jobs.
"""
