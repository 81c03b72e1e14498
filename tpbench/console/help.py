"""Help of the command line: one screen, with the first commands to type at the top."""

HELP = """\
tpbench: which implementation of a tensor-parallel operation is correct, fastest
and smallest on your machines, and how close is it to the hardware limit?

  python -m tpbench list          what there is, and whether it can run here
  python -m tpbench doctor        problems of this machine, each with a fix
  python -m tpbench new FILE.py   a variant of your own to start from
  python -m tpbench               one small job
  python -m tpbench -m variant=triton_tp,pytorch_gather shape=v131k_tp8  a sweep
  python -m tpbench -m +experiment=tp_entropy_loss                 a whole table
  python scripts/report.py outputs                            what was measured

Write NAME=VALUE; with -m, NAME=VALUE1,VALUE2 makes a job of each combination.
  variant shape model loss block_cap measure     groups: `list` shows values
  tokens vocab tp_size dp_size dtype seed   the problem
  device=auto|cuda|cpu  graph=true          where and how it is timed
  memory_limit_gib timeout_s                limits at which a job is ended
  output_dir=DIR  resume=true               where rows go; only what is missing
  dry_run=true                              with -m: show the plan, run nothing

  --cfg job     the configuration of a job, all fields (of these arguments)
  --hydra-help  Hydra's own options, among them shell completion
  --version     the version
"""
