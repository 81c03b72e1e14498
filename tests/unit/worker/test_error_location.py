"""File and line of an error."""

import json
import re
import runpy
from types import SimpleNamespace

import pytest

from tpbench.job import parse_job
from tpbench.outside.variant import OutsideVariant
from tpbench.worker import rank
from tpbench.worker.rank import location
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


class _Unreadable(Exception):
    def __str__(self):
        raise ValueError("no text")


class _Stop(BaseException):
    """A user's exception that no `except Exception` catches."""


@pytest.mark.parametrize(
    "error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), _Stop("enough"), _Unreadable()], ids=repr
)
def test_whatever_a_variant_raises_becomes_the_reason_of_its_row(error, monkeypatch):
    reasons = []
    monkeypatch.setattr(rank, "_save", lambda task, status, reason: reasons.append((status, reason)))
    monkeypatch.setattr(rank, "leave", lambda code: (_ for _ in ()).throw(RuntimeError(f"left with {code}")))

    def run():
        raise error

    with pytest.raises(RuntimeError, match=f"left with {rank.ERROR}"):
        rank.run(SimpleNamespace(run=run, now=SimpleNamespace(job=SimpleNamespace(outside=None))))
    ((status, reason),) = reasons
    assert status == "error" and reason.startswith(f"rank 0: {type(error).__name__} in test_error_location.py:")
