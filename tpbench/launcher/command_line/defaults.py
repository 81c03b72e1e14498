"""Hydra's nodes of defaults. A field's default stands in its dataclass only, and other values may refer to it."""

from typing import Any

from hydra.core.config_store import ConfigStore

from tpbench.job import Job
from tpbench.launcher.options import SweepOptions
from tpbench.measure.session import MeasureSettings
from tpbench.settings import defaults
from tpbench.workloads import NAMES, workloads


def store_defaults() -> None:
    """Store the defaults of every job as `job_defaults`, those of a workload as `workload/NAME`, and `variant=all`.

    The nodes have no types, because OmegaConf has no `Literal`: `tpbench.settings.parse` checks values.
    """
    store = ConfigStore.instance().store
    of_job: dict[str, Any] = {
        "world_size": None,
        **defaults(SweepOptions),
        **defaults(Job),
        **defaults(MeasureSettings),
    }
    for name in ("measure", "problem", "outside"):  # a group, and parts of a job that no field of a file sets
        del of_job[name]
    store("job_defaults", of_job, package="_global_")
    for name in NAMES:
        store(name, defaults(workloads()[name].problem), "workload", "_global_")
    store("all", {"variant": "all"}, "variant", "_global_")  # see SweepComposer.variants_of
