"""The lists of fields show the defaults that a command line gets, from the files of conf/."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.composed_jobs import composed
from tpbench.console.catalogue import shapes
from tpbench.console.fields import Field, choice, settings_fields
from tpbench.console.listing import description
from tpbench.job import Job
from tpbench.launcher.options import SweepOptions
from tpbench.measure.session import MeasureSettings
from tpbench.settings import parse, spelled
from tpbench.workloads import variants, workloads


def defaults(settings: type, variant: str = "") -> dict[str, Field]:
    return {field.name: field for field in settings_fields(settings, variant)}


def in_command_line(settings: type, values: dict[str, object]) -> dict[str, str]:
    """Return the fields that a job gets from these composed values, as a command line spells them."""
    job = parse(settings, {name: value for name, value in values.items() if name in settings.__dataclass_fields__})
    return {each.name: spelled(getattr(job, each.name)) for each in dataclasses.fields(settings)}


@pytest.mark.parametrize("name", sorted(variants()))
def test_defaults_of_a_variant_are_those_that_hydra_composes(name: str) -> None:
    problem = variants()[name][0].problem
    shape = shapes(0, variants()[name][0].name)[0].name
    found = in_command_line(problem, composed(f"variant={name}", f"shape={shape}"))
    expected = defaults(problem, name)
    assert {each for each, default in expected.items() if default.default is None and not default.group} == set()
    own = choice("shape", shape)
    differing = {each: found[each] for each, default in expected.items() if default.default not in (None, found[each])}
    assert differing == {each: spelled(own[each]) for each in differing}, "only the shape may set another value"
    assert {expected[each].group for each in differing} <= {"shape"}


@pytest.mark.parametrize("settings", [SweepOptions, MeasureSettings])
def test_other_defaults_are_those_that_hydra_composes(settings: type) -> None:
    values = {name: default.default for name, default in defaults(settings).items()}
    assert values == in_command_line(settings, composed())


def test_defaults_of_jobs() -> None:
    expected = defaults(Job)
    found = {name: (expected[name].default, expected[name].group) for name in ("variant", "tp_size", "dp_size")}
    assert found == {"variant": ("triton_tp", ""), "tp_size": (None, "shape"), "dp_size": ("1", "shape")}


def test_a_file_s_default_goes_before_that_of_the_code() -> None:
    problem = workloads()["train_step"].problem
    assert problem.batches is None
    assert defaults(problem)["batches"].default == "1"
    try_graphs = defaults(workloads()["tp_block"].problem)["try_graphs"]
    assert (try_graphs.default, try_graphs.group) == ("false", "variant")
    assert "  try_graphs=true " in description("variant", "block_auto", 0)
