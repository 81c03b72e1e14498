"""Reasons, known before a launch, why a variant cannot shard a model or why a loss does not fit the variant."""

from __future__ import annotations

from dataclasses import replace

from tpbench import packages
from tpbench.workloads.train_step.model.config_json import KNOWN_ARCHITECTURES
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sharding.key_value_heads import unsupported_sizes


def unsupported_plan(problem: TrainStep, variant: str, tp_size: int) -> str | None:
    """Return why the variant cannot shard the model by its plan and `tp_mapping`, or None if it can.

    The check makes the model without weights. It is left out for models whose plans are known, and without the
    transformers package.
    """
    if reason := unsupported_sizes(problem, variant, tp_size):
        return reason
    if (problem.architecture in KNOWN_ARCHITECTURES and problem.tp_mapping is None) or not packages.installed(
        "transformers"
    ):
        return None
    from tpbench.workloads.train_step.model.configuration import UnknownArchitecture
    from tpbench.workloads.train_step.model.models import build
    from tpbench.workloads.train_step.sharding.plan_requirements import REQUIREMENTS

    # A pattern of a mapping may name any layer. Without a mapping all layers have one plan.
    depth = problem.depth if problem.tp_mapping else 1
    try:
        REQUIREMENTS[variant](problem, build(replace(problem, num_layers=depth)), tp_size)
    except UnknownArchitecture as error:
        return str(error)
    return None


def unsupported_loss(problem: TrainStep) -> str | None:
    """Return why `train_loss` cannot be computed for the model, or None if it can."""
    if problem.train_loss != "tpbench_linear" or problem.architecture in KNOWN_ARCHITECTURES:
        return None
    if not packages.installed("transformers"):
        return None
    from tpbench.workloads.train_step.model.configuration import UnknownArchitecture
    from tpbench.workloads.train_step.model.logits_change import logits_change

    try:
        logits_change(problem)
    except UnknownArchitecture as error:
        return str(error)
    return None
