"""The sweeps that tests disturb, and the faults that come at random moments."""

SMALL = ("variant=pytorch_tp_manual", "tokens=16", "vocab=64", "tp_size=2", "measure=quick", "min_iterations=3",
         "max_iterations=3", "device=cpu")  # fmt: skip
SINGLE = (*SMALL, "tp_size=1")
"""A job of one rank, for faults that meet the launcher or its disk."""
WITHOUT_END = ("time_budget_s=1000000", "precision=0", "max_iterations=1000000")
"""Settings of a job that never ends by itself."""
ENDLESS = (*SMALL, *WITHOUT_END)

AT_RANDOM_MOMENTS = (
    "kill -9 of a rank",
    "kill -9 of torchrun",
    "kill -9 of the launcher",
    "kill -9 of everything",
    "SIGTERM of the launcher",
    "SIGINT of the launcher",
    "SIGHUP of the launcher",
)
