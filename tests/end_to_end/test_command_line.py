"""`python -m tpbench` as a person meets it: bad input, and a whole sweep."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import tpbench as package
from tests.support.command import DEFAULT, environment, forked, refused, tpbench

QUICK = ("measure=quick", "device=cpu")

REFUSED: list[tuple[list[str], list[str]]] = [
    (["-m", "variant=triton_tp,pytorch_gater"], ["no variant is called pytorch_gater, did you mean pytorch_gather"]),
    (["shape=v131k_tp9"], ["no shape is called v131k_tp9, did you mean v131k_tp", "python -m tpbench list shapes"]),
    (["loss=hinge"], ["no loss is called hinge", "cross_entropy", "reverse_kl"]),
    (["tokns=64"], ["no field of entropy_loss is called tokns, did you mean tokens"]),
    (["-m", "tp=4"], ["no field of entropy_loss is called tp, did you mean tp_size?"]),
    (["-m", "order=interleaved"], ["order=interleaved needs reuse=true"]),
    (["measure=fast"], ["no measure is called fast (valid: default, quick, thorough)"]),
    (["hydra/launcher=slurm"], ["no launcher is called slurm, did you mean torchrun_slurm"]),
    (["hydra.launcher.partition=gpu"], ["hydra.launcher.partition needs hydra/launcher=torchrun_slurm"]),
    (["-m", "tokens=64,0,many"], ["tokens=0 must be at least 1", "tokens=many must be a whole number"]),
    (["-m", "variant=glob(nothing*)"], ["the sweep has no cells"]),
    (["output_dir=/proc/nope"], ["tpbench: output_dir=/proc/nope cannot be written: No such file or directory"]),
    (["shape=1e3", "measure=true"], ["no shape is called 1e3"]),
    (["block_cap=1000"], ["no block_cap is called 1000", "auto", "32768"]),
    (["~vocab"], ["no field of entropy_loss is called ~vocab, did you mean vocab"]),
    (["--frobnicate"], ["no such option: --frobnicate"]),
    (["tp_size=1,2"], ["tp_size=1,2 is a sweep", "-m"]),
    (["-m", "seed=range(0,1000000000)"], ["seed=range(0,1000000000) has more than 10000 values"]),
    (["hydra.launcher._target_=os.system"], ["_target_ names Python code"]),
    (["seed=${nothing}"], ["a value refers to another one that cannot be found: seed: Interpolation key 'nothing'"]),
    (["tokens=${evil:1}"], ["Unsupported interpolation type evil"]),
    (["tokens=${vocab}", "vocab=${tokens}"], ["tpbench: a value refers to another one"]),
    (["tokens='${oc.env:HOME}'"], ['reads a variable of the environment: let the shell do it, tokens="$NAME"']),
    (["loss=\x1b[31mred"], ["loss=[31mred is not understood"]),
]


def test_wrong_input_gets_one_message_and_launches_nothing(tmp_path: Path) -> None:
    refused(REFUSED, tmp_path)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run the default sweep of `scripts/run`, with a vocabulary that the ranks cannot share equally.

    Worker processes are reused: the tests of faults and of resumed sweeps run cells in processes of their own.
    """
    folder = tmp_path_factory.mktemp("sweep")
    options = ("vocab=1001", "device=cpu", "graph=false", "block_cap=auto,4096", "reuse=true", "max_iterations=5")
    return folder, tpbench(*DEFAULT, *options, cwd=folder)


def test_a_sweep_makes_a_right_row_for_every_cell(sweep: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = sweep
    assert done.returncode == 0, done.stderr
    rows = package.load(folder / "outputs")
    assert list(zip(rows["variant"], rows["block_cap"], strict=True)) == [
        ("triton_tp", "auto"),
        ("triton_tp", "4096"),
        ("pytorch_tp_manual", "auto"),
        ("pytorch_gather", "auto"),
    ]
    assert set(rows["status"]) == {"ok"}
    assert rows["reason"].isna().all()
    assert rows["loss_value"].max() - rows["loss_value"].min() < 1e-9  # the oracle's, of equal logits
    assert (rows["loss_error"] < 1e-2).all()
    assert (rows["grad_error"] < 2e-2).all()
    assert list(rows["interpreted"]) == [True, True, False, False]


def test_rows_carry_what_was_measured(sweep: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = sweep
    for row in package.load(folder / "outputs").to_dict("records"):
        samples = pd.Series(row["samples_ms"])
        assert len(samples) == row["iterations"] >= 1
        assert row["time_ms"] == pytest.approx(samples.median())
        assert row["time_min_ms"] == samples.min()
        assert row["floor_ms"] == pytest.approx(row["bytes_moved"] / row["copy_gb_per_s"] / 1e6)
        assert row["fraction_of_floor"] == pytest.approx(row["floor_ms"] / row["time_ms"])
        assert row["gb_per_s"] == pytest.approx(row["bytes_moved"] / row["time_ms"] / 1e6)
        # A bf16 row of a 501-column shard read once and its gradient written once, and an int64 label.
        assert row["bytes_moved"] == 64 * (501 * 2 * 2 + 8)
        assert len(row["rank_peak_gib"]) == row["world_size"] == 2
        assert row["skew_ms"] >= 0 and pd.isna(row["launch_ms"])  # on a CPU the step itself computes
        assert row["wall_s"] > 0
        assert json.loads(row["job"])["vocab"] == row["vocab"] == 1001
        assert set(json.loads(row["environment"])) <= {
            "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "TRITON_INTERPRET",
        }  # fmt: skip
        for fact in ("host", "torch_version", "python_version", "cpu_model", "tpbench_version"):
            assert row[fact]
        assert pd.notna(row["kernels_version"]) == (row["variant"] == "triton_tp")


def test_a_sweep_ends_with_its_table_and_where_the_rows_are(
    sweep: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = sweep
    assert "[4/4] pytorch_gather" in done.stdout
    assert "triton_tp" in done.stdout.split("[4/4]")[1]
    assert "4 rows in outputs/rows; logs in " in done.stdout
    notes = [line for line in done.stdout.splitlines() if line.endswith(": ignored")]
    assert notes == [f"{name} has no block_cap: ignored" for name in ("pytorch_tp_manual", "pytorch_gather")]
    assert re.search(r"vocab +tp +shard +triton_tp", done.stdout)


def test_commands_that_measure_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "rows" / "broken.parquet"
    broken.parent.mkdir()
    broken.write_text("no row")
    site, made = tmp_path / "site", tmp_path / "made by an experiment"
    (site / "experiment").mkdir(parents=True)
    (site / "experiment" / "code.yaml").write_text(
        f"# @package _global_\nhydra: {{callbacks: {{x: {{_target_: os.mkdir, _args_: ['{made}']}}}}}}\n"
    )
    lines: list[list[str]] = [
        ["graph=true", "tp_size=1,2", "-m", "measure=quick", "device=cpu"],
        ["--version"],
        ["--help"],
        ["dry_run=true", "resume=true", f"output_dir={broken.parent}"],
        ["dry_run=true", "output_dir=/proc/rows"],  # nobody can write there
        ["profile", "dry_run=true"],
        ["--hydra-help"],
        ["--config-dir", str(site), "+experiment=code", "dry_run=true"],
    ]
    ended = forked(lines, tmp_path)
    assert "hydra.callbacks has no effect" in (ended[-1][1] / "stderr").read_text() and not made.exists()
    assert [code for code, _ in ended] == [0] * 7 + [2], [(folder / "stderr").read_text() for _, folder in ended]
    skipped, version, shown, *_ = ((folder / "stdout").read_text() for _, folder in ended)
    errors = (ended[3][1] / "stderr").read_text()
    assert errors.startswith(f"tpbench: warning: {broken}: skipped, it is broken: ") and errors.count("\n") == 1
    assert list(broken.parent.iterdir()) == [broken]
    rows = package.load(ended[0][1] / "outputs")
    assert list(rows["status"]) == ["skipped", "skipped"] and "2 rows in outputs/rows" in skipped
    assert set(rows["reason"]) == {"graph=true needs a CUDA GPU"}
    assert version == f"tpbench {package.__version__}\n" and "variant" in shown


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_a_torchrun_rank_0_alone_does_the_work(rank: str, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tpbench", "--variant", "pytorch_gather", "--dry-run", "device=cpu"]
    env = environment() | {"TORCHELASTIC_RUN_ID": "none", "RANK": rank}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("Nothing was run") == (rank == "0"), done.stderr
    right = "write python -m tpbench variant=pytorch_gather dry_run=true device=cpu"
    assert done.stderr.count(right) == done.stderr.count("\n") == (rank == "0")


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    line = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -m tpbench dry_run=true device=cpu"
    done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment(), capture_output=True)
    assert done.returncode == 2 and done.stderr.startswith(b"tpbench: the working folder was deleted")
