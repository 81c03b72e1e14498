"""Which changes of the code change the version of a variant's kernels."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tpbench
from tpbench.job import parse_job
from tpbench.measure.kernels_version import kernels_version
from tpbench.workloads import variants

FOLDER = Path(tpbench.__file__).parent
VARIANTS = ("triton_tp", "linear_tp", "sparse_symmetric")


def versions(package: Path) -> list[str | None]:
    """Return the versions of three variants, each of another workload, in a copy of the package."""
    kernels_version.cache_clear()
    implementations = [variants()[name][1] for name in VARIANTS]
    files = [variant.file for variant in implementations if variant.file]
    return [kernels_version((package / file.relative_to(FOLDER),), package) for file in files]


@pytest.fixture
def copies(tmp_path: Path) -> Callable[[], Path]:
    """Makes copies of the package, each in a folder of its own, because modules are parsed once."""

    def copy() -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir()))) / "tpbench"
        return Path(shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__", "rows", "docs")))

    return copy


def test_each_kernel_counts_for_the_variants_that_run_it(copies: Callable[[], Path]) -> None:
    before, changed = versions(FOLDER), copies()
    assert len(set(before)) == 3 and None not in before
    for file in changed.rglob("*.py"):
        if "@triton.jit" in (text := file.read_text()) or "@gluon.jit" in text:
            file.write_text(f"{text}\nCHANGED = True\n")
    assert not set(before) & set(versions(changed))


def test_comments_docstrings_names_of_files_and_other_kernels_do_not_count(copies: Callable[[], Path]) -> None:
    package = copies()
    for file in sorted((package / "kernels").rglob("*.py")):
        future = "from __future__ import annotations\n"
        head, found, tail = file.read_text().partition(future)
        file.write_text(f'"""Other."""\n{found}\n\n# A comment.\n{tail}' if found else f"# A comment.\n{head}")
    for file in package.rglob("*.py"):
        file.write_text(file.read_text().replace("two_pass.state", "two_pass.renamed"))
    (package / "kernels/two_pass/state.py").rename(package / "kernels/two_pass/renamed.py")
    (package / "workloads/embedding_grad/crossover.py").write_text("")
    for file in (package / "kernels/linear").glob("*.py"):
        file.write_text(f"{file.read_text()}\nCHANGED = True\n")
    before, after = versions(FOLDER), versions(package)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
    caps = copies() / "kernels" / "block_caps.json"
    caps.write_text(caps.read_text().replace("4096", "8192"))
    assert versions(caps.parents[1])[0] != before[0], "launches depend on the table"


def test_a_job_without_kernels_of_tpbench_has_none(tmp_path: Path) -> None:
    tiny = {"tp_size": 2, "tokens": 64, "vocab": 1000}
    names = ("pytorch_gather", "liger", "triton_tp")
    found = {name: parse_job({**tiny, "variant": name}).kernels_version for name in names}
    assert found == {"pytorch_gather": None, "liger": None, "triton_tp": versions(FOLDER)[0]}
    (tmp_path / "mine.py").write_text("def f(problem, shard):\n    from tpbench.kernels import entropy_loss\n")
    assert kernels_version((tmp_path / "mine.py",)) is not None
    (tmp_path / "misspelled.py").write_text("from tpbench.kernel import entropy_loss\nfrom tpbench import nothing\n")
    assert kernels_version((tmp_path / "misspelled.py",)) is None
    (tmp_path / "whole.py").write_text("from tpbench import kernels\n")
    assert kernels_version((tmp_path / "whole.py",)) not in (None, kernels_version((tmp_path / "mine.py",)))
    (tmp_path / "other.py").write_text("import triton\nfrom tpbench.api import Step, variant\n")
    assert kernels_version((tmp_path / "other.py",)) is None
