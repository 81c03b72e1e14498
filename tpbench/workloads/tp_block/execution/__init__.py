"""Ways to run a block: eagerly, compiled, as CUDA graphs, or with the schedules that are fastest in a trial.

The modules, in the order of a first reading: `prepared` is what a variant returns, `compiled` and `graphed` change how
it runs, and `autotune` tries schedules, on `isolated_operations` and whole steps, for the `choice` by measured times.
"""
