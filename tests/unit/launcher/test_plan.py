"""The plan of a sweep: which cells run, which are skipped and why, and which input is refused."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.planned_jobs import MODEL
from tpbench.job import field_names
from tpbench.launcher.options import SWEEP_OPTION_NAMES
from tpbench.launcher.planning.plan import Cell, Request, ThisHost, notes, plan
from tpbench.settings import JobError
from tpbench.workloads import variants

PLAIN = ("pytorch_tp_manual", "pytorch_gather")


def cells(*jobs: dict[str, Any], gpus: int, chosen: tuple[str, ...] = ()) -> list[Cell]:
    base = {"variant": "triton_tp", "tokens": 64, "vocab": 1000, "tp_size": 2}
    requests = [Request(index, {**base, **job}, list(chosen)) for index, job in enumerate(jobs)]
    return plan(requests, ThisHost(gpus))


@pytest.mark.parametrize(
    ("job", "gpus", "device", "reason"),
    [
        ({}, 0, "cpu", None),
        ({}, 4, "cuda", None),
        ({"device": "cpu"}, 4, "cpu", None),
        ({"tp_size": 8}, 4, "cuda", "needs 8 GPUs, found 4"),
        ({"tp_size": 2, "dp_size": 4}, 4, "cuda", "needs 8 GPUs, found 4"),
        ({"tp_size": 8}, 0, "cpu", None),
        ({"device": "cuda"}, 0, "cuda", "needs 2 GPUs, found 0"),
        ({"graph": True}, 0, "cpu", "graph=true needs a CUDA GPU"),
    ],
)
def test_where_a_job_runs(job: dict[str, Any], gpus: int, device: str, reason: str | None) -> None:
    (cell,) = cells(job, gpus=gpus)
    assert (cell.job.device, cell.skip_reason) == (device, reason)


def test_a_missing_package_skips_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (cell,) = cells({}, gpus=1)
    assert cell.skip_reason == "needs triton (not installed)"


def test_only_a_command_line_names_a_file_that_runs(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit")
    linear = {"variant": "linear_tp", "tokens": 8, "hidden": 8, "vocab": 16, "tp_size": 1}
    with pytest.raises(JobError, match=r"only a command line may name a file, as loss=FILE\.py:NAME"):
        cells({**linear, "objective": f"{tmp_path}/evil.py:loss@0"}, gpus=0)


def test_equal_cells_run_once() -> None:
    caps = [{"variant": "pytorch_gather", "block_cap": cap} for cap in (4096, 8192)]
    assert [cell.index for cell in cells(*caps, gpus=0)] == [0]
    with pytest.raises(JobError, match="run a sweep for each value of output_dir"):
        cells({"output_dir": "a"}, {"output_dir": "b"}, gpus=0)


def test_a_combination_of_fields_that_do_not_fit_is_skipped_unless_none_fits() -> None:
    wrong = {"temperature": 2}
    skipped, runs = cells(wrong, {**wrong, "loss": "reverse_kl"}, gpus=0)
    assert "loss=cross_entropy has none" in str(skipped.skip_reason) and runs.skip_reason is None
    with pytest.raises(JobError, match="loss=cross_entropy has none"):
        cells(wrong, {**wrong, "seed": 3}, gpus=0)


EMBEDDING = {"variant": "dense_reduce_scatter", "table_rows": 64, "width": 8, "tp_size": 1, "dp_size": 2}


@pytest.mark.parametrize(
    ("jobs", "shown"),
    [
        ([{}, {"vocab": 2000}], ["", ""]),
        ([{"seed": 1}, {"seed": 2}], ["seed=1", "seed=2"]),
        ([{"seed": 1}, {"seed": 2}, {"variant": "pytorch_gather", "seed": 1}], ["seed=1", "seed=2", "seed=1"]),
        ([{"seed": 1, "vocab": 2000}, {"seed": 2}], ["", ""]),  # already distinct
        ([{"measure": "quick", "time_budget_s": 1}, {"measure": "thorough"}], ["measure=quick", "measure=thorough"]),
        ([{"graph": True}, {"graph": False}], ["graph=true", "graph=false"]),
        ([{"seed": 1}, {"seed": 1}], [""]),  # the same job
        (
            [{**EMBEDDING, "distribution": one} for one in ("zipf_bigram", "uniform")] + [{}],
            ["distribution=zipf_bigram", "distribution=uniform", ""],
        ),
    ],
)
def test_cells_show_the_fields_that_vary(jobs: list[dict[str, Any]], shown: list[str]) -> None:
    found = cells(*jobs, gpus=2)
    assert [str(cell).removeprefix(str(cell.job)).strip() for cell in found] == shown


def test_an_option_that_one_of_the_variants_lacks_skips_that_cell_only() -> None:
    both = [{"variant": name, "compile": True} for name in ("pytorch_tp_manual", "triton_tp")]
    fine, skipped = cells(*both, gpus=0)
    assert fine.skip_reason is None
    assert "triton_tp does not support compile=true" in str(skipped.skip_reason)


def test_an_option_that_no_variant_of_the_sweep_has_is_refused() -> None:
    with pytest.raises(JobError, match="triton_tp does not support compile=true"):
        cells({"compile": True}, gpus=0)


def test_all_errors_of_all_requests_come_at_once() -> None:
    with pytest.raises(JobError) as caught:
        cells({"tokens": 0}, {"tokens": 0}, {"dtype": "half"}, {}, gpus=0)
    assert len(str(caught.value).splitlines()) == 2


def test_what_a_workload_lacks_is_said_with_the_way_to_change_the_line() -> None:
    train = {**MODEL, "variant": "fsdp", "model": "tiny", "tp_size": 1, "dp_size": 2}
    with pytest.raises(JobError) as caught:
        plan([Request(0, train, ["measure", "table_rows", "heds"])], ThisHost(0))
    names = len(field_names(variants()["fsdp"][0]) | SWEEP_OPTION_NAMES | {"shape", "variant"})
    assert str(caught.value).splitlines() == [
        "no field of train_step is called measure: leave it out (it is a field of entropy_loss, linear_loss, "
        "embedding_grad, tp_block)",
        "no field of train_step is called table_rows: leave it out (it is a field of embedding_grad)",
        "no field of train_step is called heds, did you mean heads or kv_heads? "
        f"(all {names}: python -m tpbench list train_step)",
    ]


def ignoring(*jobs: dict[str, Any]) -> list[str]:
    base = {"tokens": 64, "vocab": 1000, "tp_size": 2}
    requests = [Request(at, {**base, **job}, [*job]) for at, job in enumerate(jobs)]
    return notes(plan(requests, ThisHost(0)))


def test_an_ignored_option_is_named_once_for_each_variant() -> None:
    options = {"algorithm": "one_read", "tokens": 64}
    jobs = [
        {"variant": name, "block_cap": cap, **options} for name in ("triton_tp", *PLAIN) for cap in ("4096", "8192")
    ]
    assert ignoring(*jobs) == [f"{name} has no block_cap, algorithm: ignored" for name in PLAIN]


BLOCK = {"tokens": 64, "hidden": 64, "ffn": 160, "heads": 8, "kv_heads": 4, "head_dim": 8, "shape_workload": "tp_block"}


def test_settings_that_a_stack_of_blocks_ignores_are_named() -> None:
    block = {name: value for name, value in BLOCK.items() if name != "shape_workload"}
    block |= {"measure": "quick", "precision": 0.1, "graph": False}
    stacks = [{**block, "variant": name, "layers": 2} for name in ("block_tp", "block_copy_engine")]
    assert ignoring(*stacks, {**block, "variant": "block_tp"}) == [
        f"{name} has no measure, precision: ignored" for name in ("block_tp", "block_copy_engine")
    ]
    assert ignoring({**block, "variant": "block_tp"}) == []


@pytest.mark.parametrize("variant", ["block_fused", "block_copy_engine"])
def test_an_option_value_that_a_variant_refuses_is_refused_before_it_runs(variant: str) -> None:
    graph = {**BLOCK, "variant": variant, "graph": True}
    stream, chosen = {**graph, "signals": "stream"}, ("graph", "signals")
    with pytest.raises(JobError) as caught:
        cells(stream, gpus=2, chosen=chosen)
    assert str(caught.value) == (
        f"{variant} cannot be captured in a CUDA graph: its signals=stream are memory operations of the stream, which "
        "a graph cannot replay: set signals=kernel"
    )
    (cell,) = cells({**graph, "signals": "kernel"}, gpus=2, chosen=chosen)
    assert cell.skip_reason is None
    refused, fine = cells(stream, {**BLOCK, "variant": "block_tp", "graph": True}, gpus=2, chosen=chosen)
    assert "set signals=kernel" in str(refused.skip_reason) and fine.skip_reason is None


TOO_MANY = "64 ranks would share 2 CPU cores: a job on this machine may have at most 16"


@pytest.mark.parametrize(
    ("sizes", "host", "reasons"),
    [
        ((16, 64), ThisHost(0, cores=2), [None, TOO_MANY]),
        ((64,), ThisHost(64, cores=2), [None]),
        ((8,), ThisHost(0, cores=1), [None]),  # the largest shape
    ],
)
def test_cores_limit_the_ranks_of_a_job_on_a_cpu(
    sizes: tuple[int, ...], host: ThisHost, reasons: list[str | None]
) -> None:
    requests = [
        Request(at, {"variant": "triton_tp", "tokens": 64, "vocab": 1000, "tp_size": size}, [])
        for at, size in enumerate(sizes)
    ]
    assert [cell.skip_reason for cell in plan(requests, host)] == reasons
