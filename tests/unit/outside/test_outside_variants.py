"""Variants from outside this package: what the launcher reads from a file, what it refuses, and what ranks load."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import composed_jobs
from tests.support.launcher_rows import FACTS, measured
from tpbench.console import information
from tpbench.job import parse_job
from tpbench.launcher.attempt import new_task
from tpbench.launcher.command_line import outside_choices
from tpbench.launcher.command_line.arguments import accepted_by_hydra, check_overrides, overrides_of_cell, rewritten
from tpbench.launcher.planning.plan import Cell, Request, ThisHost, notes, plan
from tpbench.launcher.planning.resume import decide
from tpbench.outside import loading
from tpbench.outside.variant import from_file
from tpbench.settings import JobError
from tpbench.worker.task import Task
from tpbench.workloads.entropy_loss import EntropyLoss

PROBLEM = {"tokens": 8, "vocab": 40, "tp_size": 1, "device": "cpu"}

FILE = """\
from functools import partial
from helper import NUMBER
from tpbench.api import variant
OPTIONS = {"com" + "pile"}

@variant(options=OPTIONS, requires=tuple(["torch"]), unsupported_reason=lambda problem, tp_size: str(NUMBER))
def fast_tp(problem, shard):
    "Add one to the shard.

    More."
    return shard + 1

def _added(problem, shard, number):
    return shard + number

add_two = variant("adds 2")(partial(_added, number=2))

def one(problem): ...
""".replace('"Add', '"""Add').replace('More."', 'More."""')


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    helper = f"helper_{tmp_path.name}"  # each test has its own: a process imports a name once
    (tmp_path / "my_loss.py").write_text(FILE.replace("helper", helper))
    (tmp_path / f"{helper}.py").write_text("NUMBER = 7\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_the_command_line_names_a_function_of_a_file(folder: Path) -> None:
    arguments = ["-m", "variant=../my_loss.py:fast_tp,triton_tp", "seed=1,2"]
    renamed = rewritten(arguments)
    assert renamed == ["-m", f"variant={folder.name}|my_loss.py:fast_tp,triton_tp", "seed=1,2"]
    check_overrides(renamed[1:])
    found = outside_choices.command_line_variants[f"{folder.name}/my_loss.py:fast_tp"]
    assert (found.path, found.line) == (str(folder / "my_loss.py"), 6)  # of the decorator
    assert found.variant.summary == "Add one to the shard."
    assert (found.variant.options, found.variant.requires) == ({"compile"}, ("torch",))
    assert not found.variant.uses_triton


@pytest.mark.parametrize(
    "value", ["{folder}/my_loss.py:fast_tp", "'{folder}/my_loss.py:fast_tp'", "{folder}/my_loss.py:fast_tp,triton_tp"]
)
def test_spellings(value: str, folder: Path) -> None:
    (folder / "with space=").mkdir()
    inside = folder / "with space="
    (inside / "my_loss.py").write_text(FILE.replace("from helper import NUMBER", "NUMBER = 7"))
    renamed = rewritten(["-m", "variant=" + value.format(folder=inside)])
    assert renamed[1] == "variant=" + re.sub(r"[/']", "", value.format(folder=""))
    check_overrides(renamed[1:])


MISTAKES = {
    "f.py:a": {
        "class a: ...": "no variant in f.py is called a",
        "\ndef a(problem): ...": "f.py: a must take 2 arguments, as a(problem, shard), not (problem)",
        "def a(x, y, *, z): ...": "f.py: a must take 2 arguments, as a(problem, shard), not (x, y, *, z)",
        "x = 1\nx = = 2": "f.py:2: invalid syntax",
        "x = '\0'": "f.py",
        "\nimport flash_attn": "f.py:2: it needs flash_attn (not installed): ",
        "x = 1\nraise SystemExit(2)": "f.py:2: SystemExit: 2",
        "@variant(option=1)\ndef a(x, y): ...": "f.py:2: TypeError: variant() got an unexpected keyword argument",
        "@variant\ndef a(x, y): ...": "f.py:2: TypeError: write @variant() with parentheses",
        "@variant(options={'x'})\ndef a(x, y): ...": "f.py: a: no option of entropy_loss is called x (valid",
        "@variant(workload='x')\ndef a(x, y): ...": "f.py:2: ValueError: no workload is called x (valid: ",
        "@variant(requires='x')\ndef a(x, y): ...": "f.py: requires='x' of a has the wrong type",
    },
    "f.py:b": {"def a(x, y): ...\ndef _b(x, y): ...": "no variant in f.py is called b (valid: a)"},
    "f.py:a compile=true": {"def a(x, y): ...": "no variant in f.py is called a compile=true (valid: a)"},
    "f.py": {"def a(x, y): ...": "f.py names no function: write f.py:FUNCTION (its variants: a)"},
    "none.py:a": {"": "No such file"},
    "=cmd.py:a": {"": "=cmd.py: rename the file; its name may have letters"},
    "\u202ef.py:a": {"": "\u202ef.py: rename the file; its name may have letters"},
}
"""Values of `variant=`, each with texts of the file f.py and the messages that they cause."""


@pytest.mark.parametrize(
    ("value", "text", "message"), [(value, *case) for value, cases in MISTAKES.items() for case in cases.items()]
)
def test_a_mistake_is_one_line_before_anything_runs(value: str, text: str, message: str, folder: Path) -> None:
    imports = "from tpbench.api import variant\n" if "@variant" in text else ""
    Path("f.py").write_text(imports + text)
    with pytest.raises(JobError) as raised:
        rewritten([f"variant={value}"])
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_function_without_the_decorator_is_told_how_to_name_its_workload(folder: Path) -> None:
    outside = {"my_loss.py:one": from_file(folder / "my_loss.py", "fast_tp")}
    with pytest.raises(JobError, match=r'for a variant of tp_block @variant\(workload="tp_block"\)$'):
        parse_job({"variant": "my_loss.py:one", "shape_workload": "tp_block"}, outside=outside)
    with pytest.raises(JobError, match=r"python -m tpbench list entropy_loss shows its shapes$"):
        parse_job({"variant": "triton_tp", "shape_workload": "tp_block"})


def test_variants_of_two_files_with_one_name_have_their_folders_names_or_are_refused(folder: Path) -> None:
    for place in ("a", "b", "c", "../c"):
        Path(place).mkdir()
        Path(place, "my_loss.py").write_text(FILE.replace("from helper import NUMBER", "NUMBER = 7"))
    rewritten([f"variant={','.join(f'{place}/my_loss.py:fast_tp' for place in ('a', 'b', '../c'))}"])
    names = {f"{place}/my_loss.py:fast_tp" for place in "abc"}
    assert names == outside_choices.command_line_variants.keys()
    with pytest.raises(JobError, match=r"both declare c/my_loss\.py:fast_tp: rename one of them"):
        rewritten(["variant=c/my_loss.py:fast_tp"])


def test_only_the_command_line_loads_code(folder: Path) -> None:
    """A configuration file or a row that names a file is a job of an unknown variant."""
    with pytest.raises(JobError, match="only the command line may name a file"):
        parse_job({**PROBLEM, "variant": "../my_loss.py:fast_tp"})
    with pytest.raises(JobError, match="only the command line may name a file"):
        parse_job({**PROBLEM, "variant": "my_loss.py:fast_tp", "outside": from_file(folder / "my_loss.py", "fast_tp")})


def outside_job(folder: Path, **fields: Any) -> Any:
    found = from_file(folder / "my_loss.py", "fast_tp")
    values = {**PROBLEM, "variant": found.name, "output_dir": str(folder), **fields}
    return parse_job(values, outside={found.name: found})


def test_inputs_change_for_all_variants_of_a_sweep_with_one_from_outside(folder: Path) -> None:
    found = from_file(folder / "my_loss.py", "fast_tp")

    def is_fresh(variants: list[str], chosen: list[str], outside: dict[str, Any]) -> list[bool]:
        values = {**PROBLEM, "fresh": False, "output_dir": str(folder)}
        requests = [Request(at, values | {"variant": name}, chosen) for at, name in enumerate(variants)]
        cells = plan(requests, ThisHost(0, cores=8), outside)
        assert any("(fresh=true)" in note for note in notes(cells)) == bool(outside)
        return [cell.job.measure.fresh for cell in cells]

    assert is_fresh([found.name, "pytorch_gather"], [], {found.name: found}) == [True, True]
    assert is_fresh(["pytorch_gather"], ["fresh"], {}) == [False]
    with pytest.raises(JobError, match=r"^fresh=false: inputs change for all variants"):
        is_fresh([found.name, "pytorch_gather"], ["fresh"], {found.name: found})


def test_a_task_carries_the_variant_and_a_row_its_version_but_no_folder(folder: Path) -> None:
    job = outside_job(folder, compile=True)
    task = new_task(job, folder)
    task.save(folder / "task.json")
    assert Task.load(folder / "task.json").job == job
    assert task.columns["variant"] == f"{folder.name}/my_loss.py:fast_tp"
    assert task.columns["variant_version"] == job.outside.version and len(job.outside.version) == 12
    assert task.columns["package_versions"] is None
    job_column = str(task.columns["job"])
    assert str(folder) not in job_column.replace(f'"output_dir": "{folder}"', "")


def test_the_ranks_load_the_code_and_refuse_what_it_refuses(folder: Path) -> None:
    found = from_file(folder / "my_loss.py", "fast_tp")
    assert found.refusal(EntropyLoss(tokens=8, vocab=40), 1) == "7"  # that of the file beside it
    assert found.loaded(None)[1].prepare(None, 3) == 4
    assert from_file(folder / "my_loss.py", "add_two").loaded(None)[1].prepare(None, 3) == 5
    with pytest.raises(RuntimeError, match="only ranks load"):
        found.variant.prepare(None, 3)
    (helper,) = folder.glob("helper_*")
    Path("other.py").write_text((folder / "my_loss.py").read_text())
    Path(helper.name).write_text("NUMBER = 8\n")
    with pytest.raises(JobError, match=r"other\.py imports helper_.*\.py, and another variant in this process"):
        from_file(Path("other.py"), "fast_tp")
    with pytest.raises(RuntimeError, match=r"on this rank, my_loss\.py declares no variant gone"):
        replace(found, function="gone").loaded(None)
    helper.write_text("NUMBER = 9\n")
    loading.load_module.cache_clear()  # as another process would see it
    with pytest.raises(RuntimeError, match=r"my_loss\.py changed after the sweep began: run it again with resume=true"):
        found.loaded(None)


@pytest.mark.parametrize("edited", ["my_loss.py", "helper_*.py"])
def test_an_edit_makes_rows_stale(edited: str, folder: Path) -> None:
    before = Cell(0, outside_job(folder), None)
    measured(before, variant_version=before.job.outside.version)
    assert decide([before], FACTS)[0].reason == "measured before"
    (file,) = folder.glob(edited)
    file.write_text(f"{file.read_text()}# edited\n")
    after = Cell(0, outside_job(folder), None)
    assert after.job.key == before.job.key
    reason = f"stale: variant_version was {before.job.outside.version}, is {after.job.outside.version}"
    assert decide([after], FACTS)[0].reason == reason


def test_checkouts_beside_the_file_are_no_part_of_it(folder: Path) -> None:
    (helper,) = folder.glob("helper_*")
    helper.write_text("NUMBER = 7\nimport torch")
    before = from_file(folder / "my_loss.py", "fast_tp")
    for package, text in (("tpbench", "import triton\n"), ("torch", "print 'Python 2'\n")):
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text(text)
    after = from_file(folder / "my_loss.py", "fast_tp")
    assert (after.version, after.variant.uses_triton) == (before.version, False)


def test_a_refusal_of_the_code_is_not_tried_again(folder: Path) -> None:
    one = Cell(0, outside_job(folder), None)
    measured(one, "skipped", "it has no forward_kl", variant_version=one.job.outside.version, backend="gloo")
    assert decide([one], FACTS)[0].row is not None


def test_the_list_shows_variants_from_outside(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert information(["list", "variant=../my_loss.py:fast_tp"]) == 0
    text = capsys.readouterr().out
    assert "Add one to the shard." in text and "compile=false" in text
    assert text.splitlines()[-1].startswith("python -m tpbench variant=../my_loss.py:fast_tp shape=")


@pytest.mark.parametrize("workload", ["entropy_loss", "linear_loss"])
def test_new_writes_a_file_that_can_run(workload: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert information(["new", "start.py", "--workload", workload]) == 0
    printed = capsys.readouterr().out
    (command,) = (line.split() for line in printed.splitlines() if "shape=tiny" in line)
    (name,) = (each.removeprefix("variant=") for each in command if each.startswith("variant="))
    found = outside_choices.find_outside(name)
    assert found is not None and found.workload == workload and found.variant.summary
    assert information(["new", "start.py"]) == 2 and "start.py cannot be written: File" in capsys.readouterr().err
    assert information(["new", "sub/x.py"]) == 2 and "cannot be written: No such file" in capsys.readouterr().err
    assert information(["new", "no.txt"]) == 2 and "the file can't be called no.txt" in capsys.readouterr().err


def test_a_function_of_a_file_as_the_loss(tmp_path: Path) -> None:
    """A loss's name in a problem has the hash of the file. Wrong names are refused without running the file."""
    file = tmp_path / "own.py"
    file.write_text(
        "def cispo(logprobs, advantages, limit=5.0):\n    1 / 0\n\n\n"
        "def other(logprobs, rewards): ...\n\n\ndef constant(mask): ...\n"
    )
    values = composed_jobs.composed("variant=linear_tp", "shape=tiny_head_tp2", f"loss={file}:cispo")
    assert values["loss"] == "logprob" and values["objective"].startswith(f"{file}:cispo@")
    assert loading.function_of(values["objective"]).__name__ == "cispo"
    file.write_text(file.read_text() + "# changed\n")
    changed = composed_jobs.composed("variant=linear_tp", "shape=tiny_head_tp2", f"loss={file}:cispo")
    assert changed["objective"] != values["objective"]
    (line,) = rewritten([f"loss=policy,{file}:cispo"])
    cell = overrides_of_cell(accepted_by_hydra(["variant=linear_tp", "loss=" + line.rpartition(",")[2]]))
    assert cell == f"variant=linear_tp loss={file}:cispo"
    wrong = {
        "cisp": "function in own.py is called cisp, did you mean cispo",
        "other": "rewards",
        "constant": "logprobs",
    }
    for name, message in wrong.items():
        with pytest.raises(JobError, match=message):
            rewritten([f"loss={file}:{name}"])
