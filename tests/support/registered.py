"""Workloads of users' files that a process knows."""

from tpbench import workloads


def forget() -> None:
    """Forget workloads of users' files, as another process would."""
    if workloads._registered:
        workloads._registered.clear()
        for cached in workloads._caches:
            cached.cache_clear()
