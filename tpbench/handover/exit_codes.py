"""Exit codes of a rank, by which the launcher knows why it ended."""

ERROR = 70
"""The job failed (EX_SOFTWARE). The result says how."""

PEER_LOST = 71
"""A collective broke because another rank had ended: that rank is the cause."""

SHARED_MEMORY_FULL = 72
"""Memory ran out that interleaved cells share. The cell is measured again, alone."""

TASK_LEFT = 75
"""A reused process did not take the next task (EX_TEMPFAIL). A new process takes it."""
