"""Hydra's launcher: it plans the cells of a sweep, runs each with torchrun, and stores one row for each. No torch here.

The modules, in the order of a first reading:

- Entry: `plugin` registers the launchers with Hydra. It composes and plans the cells, and runs them with `sweep`, which
  tries failed ones again. `options` are those of a whole sweep, and `display` shows its progress.
- `command_line`: `rewrites` and `checks` work before Hydra does, with the parser of `grammar` and the `limits`.
  `model_ids` are names of models, `outside_variants` finds functions in users' files, `original_arguments` keeps the
  line as the user typed it, and `folder_error` explains errors of the output folder.
- `planning`: `compose` makes the configurations of a sweep, and `plan` makes cells of them. `target` says why a machine
  cannot run a cell, `forecast` how long a cell takes, and `resume` which cells of a resumed sweep run.
- `cells`: `attempt` is one try at a cell, `outcome` how it ended, and `row` what is stored. `failure` describes a job
  without a result. `locks` keep two sweeps from running the same cell, and `leftovers` stores results of sweeps that
  were killed.
- `host`: `runner` runs cells here: `cold` with a torchrun for each, `warm` with one that stays, and `interleaved` in
  rounds.
- `slurm` runs cells as Slurm jobs.
- Both use `torchrun`, with the command and the environment, and `process`, which supervises what was started.
- `devices`: `leases` are a job's, `choice` takes the best connected devices, `gpus` lists those of this host, and
  `cores` says how many ranks its CPU may have.
"""
