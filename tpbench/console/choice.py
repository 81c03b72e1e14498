"""`python -m tpbench list variant=triton_tp`: one choice of a group, with all that is known of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import hydra
from omegaconf import OmegaConf

from tpbench import packages
from tpbench.console import entries
from tpbench.console.defaults import CONF, choice
from tpbench.console.fields import field_lines
from tpbench.job import parse_job, unsupported_reason
from tpbench.launcher.command_line import outside_variants
from tpbench.launcher.command_line.checks import unknown_choice
from tpbench.launcher.options import GROUPS
from tpbench.outside.variant import OutsideVariant
from tpbench.settings import JobError
from tpbench.suggestions import unknown
from tpbench.workloads import Variant, Workload, variants


def description(group: str, name: str, gpus: int) -> str:
    """Return the description of `group=name`. Raises JobError if there is none."""
    if group not in GROUPS:
        raise JobError(unknown("group", group, GROUPS))
    if group == "variant" and name not in variants() and (found := outside_variants.find(name)):
        return "\n".join([f"variant={name}", *_of_outside(name, found, gpus)]) + "\n"
    if name not in entries.names(group):
        raise JobError(unknown_choice(group, name, entries.names(group)))
    lines = [
        f"{group}={name}",
        *(_of_variant(name, *variants()[name], gpus) if group == "variant" else _of_file(group, name)),
    ]
    return "\n".join(lines) + "\n"


def _of_outside(name: str, found: OutsideVariant, gpus: int) -> list[str]:
    lines = _of_variant(name, found.of_workload, found.variant, gpus, {found.name: found})
    return [
        *lines[:-1],
        f"Version {found.version}: a hash of the code. Rows of another version are stale.",
        *lines[-1:],
    ]


def _of_variant(
    name: str, workload: Workload, variant: Variant, gpus: int, outside: Mapping[str, OutsideVariant] | None = None
) -> list[str]:
    available = entries.availability(variant, gpus, workload.option_defaults)
    shapes = supported_shapes(variant.name, [each.name for each in entries.shapes(gpus, workload.name)], outside)
    lines = [f"  {variant.summary}", f"  a variant of {workload.name}: {workload.summary}", f"  runs here: {available}"]
    missing = [each for each in variant.requires if not packages.installed(each)]
    lines += [f"  install it with: {packages.install_commands(missing)}"] if missing else []
    lines += [f"  not on GPUs: {variant.cpu_only_reason}"] if variant.cpu_only_reason else []
    if isinstance(variant.no_graph_reason, str) and variant.no_graph_reason:
        lines.append(f"  no graph=true: {variant.no_graph_reason}")
    lines += [f"  shapes: {' '.join(shapes) or 'none'}", ""]
    if options := field_lines(workload.problem, variant.options, name):
        lines += ["Its options, beside the fields of every job and of its workload:", *options]
    else:
        lines += ["It has no options beside the fields of every job and of its workload."]
    run = f"python -m tpbench variant={name} shape={smallest(shapes)}"
    return [*lines, "", f"{run}{'' if workload.scheduled is True else ' measure=quick'}"]


def supported_shapes(
    variant: str, shapes: Sequence[str], outside: Mapping[str, OutsideVariant] | None = None
) -> list[str]:
    """Return those of the shapes that the variant supports, in their order.

    `outside`: the variant by its name, if it is not one of this package.
    """
    for each in (outside or {}).values():
        outside_variants.register_choice(each)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        common: Any = OmegaConf.to_container(hydra.compose("config", [f"variant={variant}", "~shape"]))

    def is_supported(shape: str) -> bool:
        values = choice("shape", shape)
        model = choice("model", values["model"]) if "model" in values else {}
        return unsupported_reason(parse_job({**common, **model, **values}, outside=outside)) is None

    return [each for each in shapes if is_supported(each)]


def smallest(shapes: Sequence[str]) -> str:
    """Return the tiny shape if there is one, else the first shape, or NAME if there is none."""
    return next((each for each in shapes if each.startswith("tiny")), shapes[0] if shapes else "NAME")


def _of_file(group: str, name: str) -> list[str]:
    """Return the content of a choice's file, and its name."""
    file = CONF / group / f"{name}.yaml"
    kept = [line for line in file.read_text(encoding="utf-8").splitlines() if "@package" not in line]
    return [*(f"  {line}".rstrip() for line in kept), "", f"This is conf/{group}/{file.name}."]
