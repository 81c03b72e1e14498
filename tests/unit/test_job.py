"""YAML's values become one validated Job, or one message that says everything that is wrong."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpbench.job import Job, field_names, key_of, parse_job, stored_job, unsupported_reason
from tpbench.launcher.options import SweepOptions
from tpbench.results.read import load
from tpbench.settings import JobError
from tpbench.workloads import workloads

TINY = {"variant": "triton_tp", "tp_size": 2, "tokens": 64, "vocab": 1000}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"variant": "triton"}, "no variant is called triton, did you mean triton_tp.*valid: .*pytorch_gather"),
        ({"loss": "revers_kl"}, "loss=revers_kl does not exist, did you mean reverse_kl.*valid: cross_entropy"),
        ({"dtype": "bf16"}, "dtype=bf16 .*valid: bfloat16, float16, float32"),
        ({"tp_size": -1}, "tp_size=-1 must be at least 1"),
        ({"shape_workload": "train_step"}, "shape is of train_step: python -m tpbench list entropy_loss shows"),
        ({"variant": {"triton_tp": 1}}, "no variant is called .'triton_tp': 1"),
    ],
)
def test_a_wrong_value_is_named_with_the_valid_ones(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message):
        parse_job({**TINY, **wrong})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"vocab": 1}, "vocab=1 cannot be sharded over tp_size=2"),
        ({"temperature": 2}, "temperature=2.0 .* loss=cross_entropy has none"),
        ({"logits_scale": 2000}, "multiply logits by 2000, which must be at most 1024 where"),
        ({"logits_scale": 8, "compute_dtype": "logits"}, "at most 4 where they are rounded to bfloat16"),
        ({"loss": "reverse_kl", "ignored": 0.5}, "ignored=0.5 needs labels"),
    ],
)
def test_fields_that_do_not_fit_together_are_a_reason_to_skip_the_cell(values: dict[str, object], reason: str) -> None:
    assert re.search(reason, str(unsupported_reason(parse_job({**TINY, **values}))))


def test_more_iterations_than_allowed_are_refused() -> None:
    few = {**TINY, "min_iterations": 10, "max_iterations": 5}
    with pytest.raises(JobError, match="min_iterations=10 must be at most max_iterations=5"):
        parse_job(few, chosen=["min_iterations", "max_iterations"])
    assert parse_job(few, chosen=["max_iterations"]).measure.max_iterations == 5


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        ({"tp_size": "auto", "world_size": 8, "dp_size": 2}, (4, 2)),
        ({"tp_size": "auto", "world_size": "8"}, (8, 1)),
        ({"tp_size": 2, "world_size": 4, "dp_size": 2}, (2, 2)),
        ({"tp_size": 2, "world_size": None}, (2, 1)),
        ({"tp_size": "auto"}, "tp_size=auto needs world_size=N"),
        ({"tp_size": "auto", "world_size": 8, "dp_size": 3}, "world_size=8 must be dp_size x tp_size, .*3 x auto"),
        ({"tp_size": 3, "world_size": 4}, "world_size=4 must be dp_size x tp_size, and not 1 x 3"),
        ({"tp_size": 3, "world_size": [3]}, "world_size=.3. tp_size=3 dp_size=None must be numbers above 0"),
        ({"tp_size": 3, "world_size": "many"}, "world_size=many tp_size=3 dp_size=None must be numbers above 0"),
    ],
)
def test_ranks_are_counted(ranks: dict[str, object], sizes: tuple[int, int] | str) -> None:
    if isinstance(sizes, str):
        with pytest.raises(JobError, match=sizes):
            parse_job({**TINY, **ranks})
        return
    job = parse_job({**TINY, **ranks})
    assert (job.tp_size, job.dp_size) == sizes
    assert "world_size" not in job.flat()


def test_auto_means_all_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpbench.job.visible_gpus", lambda: [("GPU-0", "0"), ("GPU-1", "1")])
    assert parse_job({**TINY, "tp_size": "auto"}).tp_size == 2


@given(
    tokens=st.integers(1, 10**6),
    vocab=st.integers(64, 10**6),
    tp_size=st.integers(1, 64),
    seed=st.integers(0, 2**31 - 1),
    scale=st.floats(1e-6, 1e3),
    loss=st.sampled_from(["cross_entropy", "reverse_kl"]),
)
def test_a_job_is_equal_after_json(**values: object) -> None:
    job = parse_job({**TINY, **values, "logits_scale": values["scale"]})
    again = parse_job(json.loads(json.dumps(job.flat())))
    assert again == job
    assert again.key == job.key


def test_the_key_is_of_the_resolved_job() -> None:
    job = parse_job(TINY)
    explicit = parse_job({**TINY, "dtype": "bfloat16", "seed": 0})
    elsewhere = parse_job({**TINY, "output_dir": "/elsewhere", "timeout_s": 5})
    assert job.key == explicit.key == elsewhere.key
    for change in (
        {"seed": 1},
        {"graph": True},
        {"profile": True},
        {"tp_size": 1},
        {"memory_limit_gib": 1},
        {"variant": "pytorch_gather"},
    ):
        assert parse_job({**TINY, **change}).key != job.key


def test_flat_names_are_unique_across_the_parts_of_a_job_and_a_sweep() -> None:
    for workload in workloads().values():
        job_fields = set(Job.__dataclass_fields__) - {"measure"} | set(SweepOptions.__dataclass_fields__)
        problem_fields = set(workload.problem.__dataclass_fields__)
        assert not job_fields & problem_fields
        assert problem_fields <= field_names(workload)


ROOT = Path(__file__).resolve().parents[2]


def test_a_stored_job_of_another_version_has_a_key_too() -> None:
    """Otherwise `resume=true` would measure cells again because tpbench has a new field."""
    job = parse_job(TINY)
    older = {name: value for name, value in job.flat().items() if name not in ("fresh", "profile", "algorithm")}
    assert key_of(older) == key_of(job.flat()) == job.key
    assert key_of({**older, "fresh": True}) == parse_job({**TINY, "fresh": True}).key != job.key
    assert key_of({**older, "profiler": None}) == job.key != key_of({**older, "removed": 1})
    assert key_of(older | {"profile": False}) == job.key != key_of(older | {"profile": True})
    assert key_of({**older, "output_dir": "b"}) == job.key


@pytest.mark.parametrize("folder", ["outputs/reference", "outputs/options", "tpbench/kernels/rows"])
def test_committed_rows_are_of_jobs_of_this_version(folder: str) -> None:
    """But for rows of users' files, which only a command line names, and of a variant that was removed."""
    rows = load(ROOT / folder, columns=["job", "key"])
    jobs = [json.loads(job) for job in rows["job"]]
    assert [key_of(job) for job in jobs] == rows["key"].tolist()
    present = [job for job in jobs if ":" not in job["variant"] and job["variant"] != "block_auto"]
    assert [stored_job(job).key for job in present] == [key_of(job) for job in present]


def test_a_job_says_its_sizes_and_what_is_not_the_default() -> None:
    assert str(parse_job(TINY)) == "triton_tp loss=cross_entropy tokens=64 vocab=1000 tp_size=2"
    more = parse_job({**TINY, "dp_size": 3, "block_cap": 4096})
    assert str(more) == "triton_tp loss=cross_entropy tokens=64 vocab=1000 tp_size=2 dp_size=3 block_cap=4096"
    assert (more.world_size, more.chosen_options()) == (6, {"block_cap": 4096})
    assert parse_job(TINY).chosen_options() == {}
    stack = parse_job({**BLOCK, "tp_size": 2, "layers": 3})
    assert str(stack) == "block_tp hidden=64 ffn=160 tokens=64 layers=3 tp_size=2"
    assert "layers" not in str(parse_job({**BLOCK, "tp_size": 2}))


BLOCK = {"variant": "block_tp", "tokens": 64, "hidden": 64, "ffn": 160, "heads": 8, "kv_heads": 4, "head_dim": 8}


def test_inputs_of_iterations_that_continue_each_other_cannot_be_fresh() -> None:
    stack = {**BLOCK, "tp_size": 2, "layers": 2}
    assert unsupported_reason(parse_job({**stack, "fresh": True})) == (
        "fresh=true has no meaning for this tp_block: each iteration continues the one before"
    )
    assert unsupported_reason(parse_job(stack)) is None


@pytest.mark.parametrize(
    ("variant", "graph", "chosen", "signals"),
    [
        ("block_copy_engine", True, [], "kernel"),
        ("block_copy_engine", True, ["signals"], "stream"),
        ("block_copy_engine", False, [], "stream"),
        ("block_tp", True, [], "stream"),  # it has no such option
    ],
)
def test_a_graph_sets_the_options_that_it_requires(variant: str, graph: bool, chosen: list[str], signals: str) -> None:
    job = parse_job({**BLOCK, "tp_size": 2, "variant": variant, "graph": graph, "signals": "stream"}, chosen=chosen)
    assert job.problem.signals == signals and job.measure.graph is graph


def test_settings_that_a_stack_ignores_are_not_in_its_key() -> None:
    stack = {**BLOCK, "tp_size": 2, "layers": 2}
    ignored = {"measure": "quick", "time_budget_s": 0.5, "min_iterations": 3, "max_iterations": 4, "precision": 0.2}
    assert parse_job({**stack, **ignored}).key == parse_job(stack).key
    others: list[dict[str, object]] = [{"layers": 0}, {"graph": True}, {"steps": 4}, {"fresh": True}]
    assert len({parse_job({**stack, **other}).key for other in [{}, *others]}) == 5
    block = {**stack, "layers": 0}
    assert parse_job({**block, **ignored}).key != parse_job(block).key
