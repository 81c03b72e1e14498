"""Topics of `python -m tpbench list`: each has sections of choices."""

from __future__ import annotations

from tpbench.console.entries import Entry, installed_section, sections, shapes, variant_section
from tpbench.settings import JobError
from tpbench.suggestions import unknown
from tpbench.workloads import workloads

TOPICS = ("variants", "shapes", "models", "losses", "experiments")


def sections_of(topic: str, gpus: int) -> list[tuple[str, list[Entry]]]:
    """Return the sections of a topic: `all`, a kind of choices such as `shapes`, or the name of a workload.

    The first section of a workload has its variants. Raises JobError if there is no such topic.
    """
    if topic in workloads():
        workload = workloads()[topic]
        return [variant_section(workload, gpus), ("shape=", shapes(gpus, topic))]
    all_sections = [*sections(gpus), *installed_section(gpus)]
    if topic == "all":
        return all_sections
    if topic not in TOPICS:
        raise JobError(unknown("topic of list", topic, ("all", "fields", *TOPICS, *workloads(), "variant=NAME")))
    prefixes = dict(zip(TOPICS, ("variant=", "shape=", "model=", "loss=", "+experiment="), strict=True))
    return [(title, entries) for title, entries in all_sections if title.startswith(prefixes[topic])]
