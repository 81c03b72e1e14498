"""A workload of a user's file: what the launcher learns of it, what it refuses, and rows without the file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tpbench
from tests.support.launcher_rows import FACTS
from tests.support.registered import forget
from tpbench import workloads
from tpbench.console import information
from tpbench.job import Job, parse_job
from tpbench.launcher.attempt import new_task, store
from tpbench.launcher.command_line import outside_choices
from tpbench.launcher.command_line.arguments import accepted_by_hydra, rewritten
from tpbench.launcher.options import command_line_names
from tpbench.outside.variant import from_file
from tpbench.report.analysis.grid import arrange_rows
from tpbench.report.analysis.pairs import pair_cells
from tpbench.results.schema import workload_columns
from tpbench.settings import JobError
from tpbench.worker.task import Task
from tpbench.workloads import definition

ROOT = Path(__file__).resolve().parents[3]
FILE = """\
from dataclasses import dataclass
import torch
from tpbench.api import Costs, Rank, Workload, setting

@dataclass(frozen=True)
class MyCopy:
    tokens: int = setting(8, help="rows", low=1)
    delay_ms: float = setting(0.5, help="wait")
    how: str = setting("plain", help="way")

work = Workload(MyCopy, "a copy")

@work.inputs
def inputs(problem, rank):
    return {"x": torch.ones(problem.tokens)}

@work.reference
def reference(problem, inputs, rank):
    return {"y": inputs["x"].double()}

@work.variant("copies")
def copies(problem, inputs, rank):
    return lambda: {"y": inputs["x"].clone()}
"""
MISTAKES = {
    "my_op.py:5: NameError: name 'nothing' is not defined": ("@dataclass", "nothing\n@dataclass"),
    "my_op.py: the workload my_copy has no inputs: decorate a function with its .inputs": ("@work.inputs\n", ""),
    "my_op.py: reference must take 3 arguments, as reference(problem, inputs, rank), not (problem)": (
        "def reference(problem, inputs, rank)", "def reference(problem)",
    ),
    "my_op.py:21: TypeError: no argument of a variant is called needs_cuda, did you mean requires_cuda? (valid: ": (
        '@work.variant("copies")', '@work.variant("copies", needs_cuda=True)',
    ),
    "my_op.py: requires='numpy' of copies has the wrong type": (
        '@work.variant("copies")', '@work.variant("copies", requires="numpy")',
    ),
    "my_op.py:21: TypeError: variant decorates a function (def), not <class '": (
        "def copies(problem, inputs, rank)", "class A:\n  def copies(problem, inputs, rank)",
    ),
    "my_op.py: MyCopy: the field tokens has no help: write tokens = setting(": ('setting(8, help="rows", low=1)', "8"),
    "my_op.py: MyCopy: the field tokens must be an int, float, str, bool or Literal": ("tokens: int", "tokens: list"),
    "my_op.py:11: TypeError: Workload needs a frozen dataclass": ("Workload(MyCopy", "Workload(8"),
    "my_op.py: entropy_loss is the name of a workload of tpbench": ('"a copy")', '"a copy", name="entropy_loss")'),
    "my_op.py: my copy is not an identifier: write Workload(..., name=...)": ('"a copy")', '"a copy", name="my copy")'),
    "my_op.py: the column tokens of my_copy has a name that tpbench or a field uses": (
        '"a copy")', '"a copy", columns={"tokens": "rows that were seen"})',
    ),
    'my_op.py:11: TypeError: tolerances are by dtype, as {"float32": 1e-5}, not {': (
        '"a copy")', '"a copy", tolerances={"float32": "1e-5"})',
    ),
    "my_op.py: the field seed of my_copy has a name that tpbench or a field uses": ("how: str", "seed: str"),
    "my_op.py: the field tokens of my_copy has a name that tpbench": ("tokens: int", "tokens: float"),
    "my_op.py: the field layers of my_copy has a name that tpbench": ("how: str", "layers: str"),
    "my_op.py: the field hidden of my_copy has a name that tpbench": ("delay_ms: float", "hidden: float"),
    "my_op.py: the column entropy of my_copy has a name that tpbench": (
        '"a copy")', '"a copy", columns={"entropy": "of the outputs"})',
    ),
    "my_op.py: the column mfu of my_copy has a name that tpbench": ('"a copy")', '"a copy", columns={"mfu": "share"})'),
    "my_op.py: the field hardware of my_copy has a name that tpbench": ("how: str", "hardware: str"),
    "my_op.py: the field tp of my_copy has a name that tpbench": ("how: str", "tp: str"),
    "my_op.py: the field dp of my_copy has a name that tpbench": ("how: str", "dp: str"),
    "no variant in my_op.py is called copies, did you mean copied? (valid: copied)": ("def copies", "def copied"),
}  # fmt: skip
"""Messages, each with a change of the file that causes it."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the file. It is the current one."""
    (tmp_path / "my_op.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parsed(chosen: Sequence[str] = (), **fields: Any) -> Job:
    """Return the job of the file's variant, which the command line has named."""
    values = {"variant": "my_op.py:copies", "tp_size": 2, "device": "cpu", **fields}
    return parse_job(values, chosen, outside=outside_choices.command_line_variants)


def test_fields_that_are_text_take_what_was_typed(folder: Path) -> None:
    """Also choices that Hydra would take for truth values, and a path with a comma."""
    choice = 'way: Literal["true", "1e3"] = setting("true", help="choice")\n    how: str'
    (folder / "a,b").mkdir()
    text = FILE.replace("how: str", choice).replace("import torch", "from typing import Literal\nimport torch")
    (folder / "a,b/my_op.py").write_text(text)
    typed = [f"variant={folder}/a,b/my_op.py:copies", "how=1.10,true,null", "way=true,1e3", "tokens=8,16"]
    written = rewritten(typed)
    assert written == ["variant=my_op.py:copies", *typed[1:], "shape=my_copy"]
    assert accepted_by_hydra(written)[1:4] == [
        "++how='1.10','true',null", "++way='true','1e3'", "++tokens=8,16",
    ]  # fmt: skip
    flat = parsed(how=None, way=True).flat()
    assert (flat["how"], flat["way"]) == ("null", "true")


def test_a_file_declares_fields_variants_and_columns(folder: Path) -> None:
    assert rewritten(["-m", "variant=my_op.py:copies", "delay_ms=1,2"])[3:] == ["shape=my_copy"]
    assert {"tokens", "delay_ms", "how", "seed"} <= command_line_names()
    assert rewritten(["variant=my_op.py:all"])[0] == "variant=my_op.py:copies"
    job = parsed(["delay_ms"], delay_ms="2", output_dir="rows")
    assert str(job) == "my_op.py:copies tokens=8 delay_ms=2 how=plain tp_size=2"
    with pytest.raises(JobError, match=r"no field of my_copy is called delay, did you mean delay_ms\?"):
        parsed(["delay"])
    with pytest.raises(JobError, match="write its fields as NAME=VALUE"):
        parsed(shape_workload="entropy_loss")
    with pytest.raises(JobError, match=r"tokens=0 must be at least 1 \(rows\)"):
        parsed(tokens=0)
    task = new_task(job, folder)
    task.save(folder / "task.json")
    forget()
    loaded = Task.load(folder / "task.json")  # on a rank
    assert loaded.job.key == job.key and loaded.columns["workload_definition"]
    assert job.outside is not None
    workload, variant, problem = job.outside.loaded(job.problem)
    assert type(problem).__name__ == "MyCopy" and problem.delay_ms == 2.0 and problem.seed == 0
    assert "reference" in workload.functions and variant.place == (str(folder / "my_op.py"), 21)


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_line(message: str, folder: Path) -> None:
    before, after = MISTAKES[message]
    (folder / "my_op.py").write_text(FILE.replace(before, after))
    with pytest.raises(JobError) as caught:
        rewritten(["variant=my_op.py:copies"])
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def run(folder: Path, text: str, cell: int, file: str = "my_op.py", **fields: Any) -> None:
    """Store a row of the file's variant, as a process of its own does. The file is gone then."""
    (folder / file).write_text(text)
    outside_choices.command_line_variants.clear()
    rewritten([f"variant={file}:copies"])
    job = parsed(variant=f"{file}:copies", output_dir=str(folder / "outputs"), **fields)
    task = new_task(job, folder / str(cell), cell=cell, **FACTS)
    store(task.result("ok", None, time_ms=1.0 + cell, output_error=0.0), job, task.folder)
    (folder / file).unlink()
    forget()


HOW = '    how: str = setting("plain", help="way")\n'
MORE = '    more: int = setting(3, help="factor")\n'


def test_a_row_older_than_a_field_has_its_default(folder: Path) -> None:
    run(folder, FILE, 0, tokens=8)
    run(folder, FILE.replace(HOW, HOW + MORE), 1, tokens=9)
    rows = tpbench.load(folder / "outputs")
    assert list(rows["tokens"]) == [8, 9] and list(rows["more"]) == [3, 3] and list(rows["how"]) == ["plain"] * 2
    assert list(rows["label"]) == ["my_op.py:copies"] * 2 and len(arrange_rows(rows)) == 1
    assert (workload_columns()["my_copy"]["delay_ms"].unit, rows["workload"][0]) == ("ms", "my_copy")


@pytest.mark.parametrize(
    ("text", "file"),
    [
        (FILE.replace(HOW, MORE), "my_op.py"),  # renamed
        (FILE.replace(HOW, ""), "my_op.py"),  # removed
        (
            FILE.replace("    tokens", '    more: int = setting(help="factor")\n    tokens', 1),
            "my_op.py",
        ),  # added, without a default
        (FILE, "other.py"),
    ],
    ids=["renamed", "removed", "required", "another file"],
)
def test_a_row_of_another_form_of_its_operation_is_another_problem(text: str, file: str, folder: Path) -> None:
    for cell, delay in enumerate((1.0, 2.0)):
        run(folder, FILE, cell, delay_ms=delay)
    run(folder, text, 2, file, delay_ms=2.0, **({"more": 7} if "more" in text else {}))
    rows = tpbench.load(folder / "outputs")
    assert "more" not in rows or list(rows["more"].isna()) == [True, True, False]
    assert list(rows["how"].fillna("")) == ["plain", "plain", "plain" if HOW in text else ""]
    today, older = arrange_rows(rows)
    assert (
        len(older.lines) == 2
        and len(today.lines) == 1
        and older.facts["form"] == f"tokens, delay_ms, how, seed ({folder.resolve()}/my_op.py)"
    )
    pairs = pair_cells(rows[:2], rows[2:])
    assert len(pairs) == 3 and not any(old and new for _, old, new in pairs)
    assert information(["report", "outputs", "--columns", "how,delay_ms", "--only", "delay_ms=1"]) == 0


def test_two_files_of_one_name_are_two_problems_and_an_edited_one_stays_itself(folder: Path) -> None:
    for cell, place in enumerate(("one/.git", "two")):
        (folder / place).mkdir(parents=True)
        run(folder, FILE, cell, f"{place[:3]}/my_op.py")
    run(folder, FILE.replace("a copy", "another copy"), 2, "one/my_op.py")
    rows = tpbench.load(folder / "outputs")
    assert list(rows["variant"]) == ["one/my_op.py:copies", "two/my_op.py:copies", "one/my_op.py:copies"]
    first, second = arrange_rows(rows)
    assert "form" not in first.facts and second.facts["form"].endswith("/two/my_op.py)")
    assert [[record["row_id"] for record in grid.records] for grid in (first, second)] == [
        [rows["row_id"][2]],
        [rows["row_id"][1]],
    ]
    assert any(old and new for _, old, new in pair_cells(rows[:1], rows[2:]))
    assert not any(old and new for _, old, new in pair_cells(rows[:1], rows[1:2]))


def test_a_file_is_known_when_rows_of_others_are_read(folder: Path) -> None:
    rewritten(["variant=my_op.py:copies"])
    assert next(iter(outside_choices.command_line_variants.values())).of_workload.name == "my_copy"
    rows = tpbench.load(ROOT / "outputs/options")
    assert len(rows) and (rows["delay_ms"].isna().all() if "delay_ms" in rows else True)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ("yield f'tokens={self.tokens} is odd'", "tokens=8 is odd"),
        ("return ['odd', 'small']", "odd"),
        ("return 'odd'", "odd"),
        ("return None", None),
        ("return []", None),
        ("return True", "check must return complaints, a list of str, not True"),
        ("return [(8, 'odd')]", "check must return complaints, a list of str, not [(8, 'odd')]"),
    ],
)
def test_the_complaints_of_a_problem(ends: str, expected: str | None, folder: Path) -> None:
    check = f"    def check(self, tp_size, dp_size):\n        {ends}\n\nwork = "
    (folder / "my_op.py").write_text(FILE.replace("work = ", check, 1))
    found = from_file(folder / "my_op.py", "copies")
    try:
        refusal = found.refusal(found.of_workload.problem(), 1)
    except TypeError as error:
        refusal = str(error)
    assert refusal == expected


def test_a_session_of_its_own_fixes_the_iterations(folder: Path) -> None:
    session = FILE[FILE.index("@work.inputs") : FILE.index("@work.variant")]
    (folder / "my_op.py").write_text(
        FILE.replace(session, "@work.session\ndef session(problem, variant, rank): ...\n\n")
    )
    rewritten(["variant=my_op.py:copies"])
    assert parsed().scheduled
    with pytest.raises(JobError, match="no field of my_copy is called max_iterations: leave it out"):
        parsed(["max_iterations"], max_iterations=3)


def test_null_is_a_value_of_a_field(folder: Path) -> None:
    (folder / "my_op.py").write_text(
        FILE.replace("delay_ms: float = setting(0.5", "delay_ms: float | None = setting(None")
    )
    rewritten(["variant=my_op.py:copies"])
    for cell, delay in enumerate((None, 2.0)):
        job = parsed(delay_ms=delay, output_dir="outputs")
        task = new_task(job, folder / str(cell), cell=cell, **FACTS)
        store(task.result("ok", None, time_ms=1.0), job, task.folder)
    (grid,) = arrange_rows(tpbench.load("outputs"))
    assert [grid.problem_text(key, grid.varying) for key in grid.lines] == ["delay_ms=2", "delay_ms=-"]


@pytest.mark.parametrize(
    "text",
    ['{"name": "x"}', "[1]", "no JSON", '{"name": "entropy_loss", "title": "", "fields": [], "costs": true}',
     '{"name": "a", "title": "", "fields": [{"name": "x y", "type": "int"}]}',
     '{"name": "a", "title": "", "fields": [{"name": "x", "type": "os.system", "null": false, "help": ""}]}'],
)  # fmt: skip
def test_a_definition_that_tpbench_did_not_make_is_left_out(text: str, folder: Path) -> None:
    before = dict(workloads.workloads())
    definition.register_stored([text, None, 7])
    assert workloads.workloads() == before


def test_new_writes_an_operation_and_the_list_shows_its_fields(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert information(["new", "start.py", "--workload", "new"]) == 0
    assert "variant=start.py:all_to_all,start.py:all_gather tp_size=2 measure=quick" in capsys.readouterr().out
    assert information(["list", "variant=start.py:all_to_all"]) == 0
    text = capsys.readouterr().out
    assert "hidden=1024" in text and "width of a token [at least 1]" in text
    assert text.splitlines()[-1] == "python -m tpbench variant=start.py:all_to_all tp_size=2 measure=quick"
