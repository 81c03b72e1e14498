"""File and line of an error."""

import json
import re
import runpy

import pytest

from tpbench.job import parse_job
from tpbench.outside.variant import OutsideVariant
from tpbench.worker.process import location
from tpbench.workloads.step import Step


def raised(function, *arguments):
    with pytest.raises(Exception) as caught:
        function(*arguments)
    return caught.value


def test_a_line_of_this_package_is_relative_to_it():
    place = location(raised(parse_job, {"variant": "nope"}))
    assert re.fullmatch(r"tpbench/job\.py:\d+ \(_variant\)", place)


def test_an_error_of_this_package_that_a_value_of_a_variant_caused_names_the_variant_too():
    mine = OutsideVariant("mine.py:fast", path="/home/me/mine.py", line=7)
    place = location(raised(Step(lambda shard: None)), mine)  # called without arguments
    assert re.fullmatch(r"tpbench/workloads/step\.py:\d+ \(__call__\), with the variant of mine\.py:7", place)


def test_frames_of_libraries_are_left_out(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import json\n\n\ndef prepare():\n    return json.loads('{')\n")
    assert location(raised(runpy.run_path(str(file))["prepare"])) == "mine.py:5 (prepare)"


def test_an_error_without_such_a_line():
    error = raised(json.loads, "{")
    error.__traceback__ = error.__traceback__.tb_next
    assert location(error) == ""
