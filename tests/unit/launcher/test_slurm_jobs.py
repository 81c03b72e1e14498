"""What Slurm is asked for: options, the spread over nodes, the torchrun line of a node. Needs no Slurm."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.support.launcher_rows import cell
from tpbench.job import Job, parse_job
from tpbench.launcher import torchrun
from tpbench.launcher.attempt import Attempt, Outcome, abandon, discard_rows
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.overrides import check_overrides
from tpbench.launcher.plan import Cell
from tpbench.launcher.slurm import cluster, collect
from tpbench.launcher.slurm.arrays import Part, parts
from tpbench.launcher.slurm.cluster import Cluster, states
from tpbench.launcher.slurm.layout import Layout, layout
from tpbench.launcher.slurm.runner import Slurm
from tpbench.launcher.slurm.settings import SlurmSettings
from tpbench.launcher.slurm.submitted import NOBODY, Submitted, left_behind, record, unfinished
from tpbench.settings import JobError

CONF = Path(__file__).resolve().parents[3] / "conf"
FILE = CONF / "hydra/launcher/torchrun_slurm.yaml"


def job(**values: Any) -> Job:
    return parse_job({"variant": "triton_tp", "tokens": 64, "vocab": 1000, "device": "cuda", **values})


def test_the_file_has_every_option_with_its_default_and_a_comment() -> None:
    values = yaml.safe_load(FILE.read_text())
    del values["_target_"]
    assert SlurmSettings.parse(values) == SlurmSettings()
    assert set(values) == set(SlurmSettings.__dataclass_fields__)
    assert all("#" in line for line in FILE.read_text().splitlines() if line and not line.startswith("_"))


def test_what_the_file_says_of_further_arguments_can_be_said() -> None:
    (line,) = re.findall(r"'(\+hydra\.launcher\.sbatch=.*)'", FILE.read_text())
    check_overrides(["hydra/launcher=torchrun_slurm", line], CONF)
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose("config", ["hydra/launcher=torchrun_slurm", line], return_hydra_config=True)
    values: Any = OmegaConf.to_container(config.hydra.launcher)
    del values["_target_"]
    assert SlurmSettings.parse(values).sbatch == (("mail-type", "END"), ("reservation", "tests"))


def test_a_misspelled_option_answers_with_the_valid_ones() -> None:
    with pytest.raises(JobError, match=r"no option of torchrun_slurm is called partitoin, did you mean partition.*qos"):
        check_overrides(["-m", "hydra/launcher=torchrun_slurm", "hydra.launcher.partitoin=gpu"], CONF)
    with pytest.raises(JobError, match="no launcher is called slurm, did you mean torchrun_slurm"):
        check_overrides(["hydra/launcher=slurm"], CONF)
    with pytest.raises(JobError, match=r"hydra\.launcher\.partition needs hydra/launcher=torchrun_slurm"):
        check_overrides(["hydra.launcher.partition=gpu"], CONF)
    check_overrides(["hydra/launcher=torchrun_slurm", "hydra.launcher.sbatch.mail-type=END"], CONF)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"time_limit_min": 0}, "time_limit_min=0 must be at least 1"),
        ({"gpus_per_node": "many"}, "gpus_per_node=many must be a whole number"),
        ({"setup": {"a": 1}}, "setup must be a list of shell lines"),
        ({"nodes": 4}, "no option of torchrun_slurm is called nodes"),
    ],
)
def test_options_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        SlurmSettings.parse(values)


@pytest.mark.parametrize(
    ("tp_size", "dp_size", "per_node", "nodes", "ranks"),
    [
        (8, 1, 8, 1, 8),
        (2, 1, 8, 1, 2),
        (2, 4, 8, 1, 8),
        (8, 2, 8, 2, 8),
        (2, 6, 8, 2, 6),  # three replicas a node, not four and two
        (4, 5, 8, 5, 4),
        (2, 2, 2, 2, 2),
        (3, 4, 8, 2, 6),
    ],
)
def test_tensor_parallel_ranks_share_a_node_and_replicas_spread(
    tp_size: int, dp_size: int, per_node: int, nodes: int, ranks: int
) -> None:
    assert layout(job(tp_size=tp_size, dp_size=dp_size), per_node) == Layout(nodes, ranks, "cuda")


def test_what_an_array_asks_for() -> None:
    settings = SlurmSettings.parse({"partition": "p", "mem_gib": 1.5, "sbatch": {"mail-type": "END"}, "qos": "low"})
    assert Layout(2, 8, "cuda").resources(settings, timeout_s=90, parallelism=256) == {
        "nodes": 2, "ntasks_per_node": 1, "gpus_per_node": 8, "time": 12, "mem": "1536M", "partition": "p",
        "qos": "low", "array_parallelism": 256, "signal_delay_s": 90,
        "additional_parameters": {"requeue": True, "mail-type": "END"},
    }  # fmt: skip
    on_cpus = Layout(1, 2, "cpu").resources(SlurmSettings(), timeout_s=600, parallelism=256)
    assert (on_cpus["cpus_per_task"], on_cpus["time"], "gpus_per_node" in on_cpus) == (2, 20, False)


def test_an_array_that_waits_for_another_keeps_what_the_person_wants_it_to_wait_for() -> None:
    settings = SlurmSettings.parse({"sbatch": {"dependency": "singleton"}})
    asked = Layout(1, 2, "cpu").resources(settings, timeout_s=90, parallelism=1, after="7")
    assert asked["additional_parameters"] == {"requeue": True, "dependency": "singleton,afterany:7"}
    alone = Layout(1, 2, "cpu").resources(SlurmSettings(), timeout_s=90, parallelism=1)
    assert alone["additional_parameters"] == {"requeue": True}


@given(st.integers(1, 5000), st.integers(1, 1001), st.integers(1, 300))
def test_arrays_hold_all_jobs_and_run_together_no_more_than_is_allowed(jobs: int, longest: int, most: int) -> None:
    made = parts(jobs, longest, most)
    assert sum(each.size for each in made) == jobs
    assert max(each.size for each in made) <= longest
    assert len(made) == -(-jobs // longest)
    beginning = [each.parallelism for each in made if each.after is None]
    assert min(beginning) >= 1
    assert sum(beginning) == most
    for at, each in enumerate(made):
        if each.after is not None:
            assert (each.after < at) and (each.parallelism == made[each.after].parallelism)
    followed = [each.after for each in made if each.after is not None]
    assert len(followed) == len(set(followed))


def test_one_array_is_one_where_it_fits() -> None:
    assert parts(4, 1001, 256) == [Part(4, 256, None)]
    assert parts(5, 2, 3) == [Part(2, 1, None), Part(2, 1, None), Part(1, 1, None)]
    assert parts(5, 2, 2) == [Part(2, 1, None), Part(2, 1, None), Part(1, 1, 0)]


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ("MaxArraySize            = 1001\nMaxJobCount = 10000\nSchedulerParameters = (null)", 1001),
        ("MaxArraySize            = 4000\nSchedulerParameters = defer,max_array_tasks=1000,bf_interval=2", 1000),
        ("MaxArraySize            = 0\n", 1),
        ("", 1001),
    ],
)
def test_how_long_an_array_may_be(config: str, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.subprocess, "run", lambda line, **_: subprocess.CompletedProcess(line, 0, config, ""))
    assert cluster.longest_array() == longest


def test_what_slurm_refuses_is_said_in_one_line() -> None:
    said = cluster.refused(
        "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates "
        "accounting/QOS policy (job submit limit, user's size and/or time limits)\n"
    )
    assert said.startswith("Slurm does not take the jobs: AssocMaxSubmitJobLimit; Batch job submission failed: Job")
    assert "MaxSubmitJobs or a limit like it" in said and "\n" not in said
    other = cluster.refused("sbatch: error: Batch job submission failed: Invalid feature specification")
    assert other.endswith("Invalid feature specification")


def test_a_replica_that_no_node_holds_is_an_obstacle() -> None:
    nodes = Cluster(gpus_per_node=8, cores_per_node=64, nodes=100)
    assert nodes.obstacle(job(tp_size=8, dp_size=100)) is None
    assert nodes.obstacle(job(tp_size=16)) == "needs 16 GPUs of one node, a node has 8"


def test_more_nodes_than_there_are_is_an_obstacle() -> None:
    two = Cluster(gpus_per_node=8, cores_per_node=64, nodes=2)
    assert two.obstacle(job(tp_size=4, dp_size=4)) is None
    assert two.obstacle(job(tp_size=4, dp_size=5)) == "needs 5 nodes, the partition has 2"
    assert two.obstacle(job(tp_size=4, dp_size=32, device="cpu")) is None
    assert two.obstacle(job(tp_size=4, dp_size=33, device="cpu")) == "needs 3 nodes, the partition has 2"


@pytest.mark.parametrize(("partition", "nodes"), [(None, 12), ("gpu", 10)])
def test_a_partition_is_as_sinfo_has_it(partition: str | None, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(line: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        said = "gpu|8|64|gpu:h100:8(S:0-1),gpu:mig:2\ngpu|2|32+|(null)\n"
        return subprocess.CompletedProcess(line, 0, said if partition else f"{said}cpu*|12|16|(null)\n", "")

    monkeypatch.setattr(cluster.subprocess, "run", answer)
    monkeypatch.setattr(cluster.shutil, "which", lambda name: name)
    monkeypatch.setattr(cluster.machine, "version", lambda name: "2.13.0")
    assert Cluster.find(SlurmSettings(partition=partition)) == Cluster(10, 64, nodes)


def test_a_person_is_told_why_a_job_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "7_0|PENDING|ReqNodeNotAvail, UnavailableNodes:a\n7_1|RUNNING|None\n7_2|PENDING|None\n"
    monkeypatch.setattr(cluster.subprocess, "run", lambda line, **_: subprocess.CompletedProcess(line, 0, said, ""))
    found = states(["7_0", "7_1", "7_2"])
    assert found == {"7_0": "PENDING", "7_1": "RUNNING", "7_2": "PENDING"}
    words = ["pending (ReqNodeNotAvail, UnavailableNodes:a)", "running", "pending"]
    assert [each.words for each in found.values()] == words


def test_the_torchrun_line_of_the_second_of_two_nodes() -> None:
    line = torchrun.command(
        job(tp_size=4, dp_size=2),
        Path("/out/sweeps/S/3/node1/cell.json"),
        Path("/out/sweeps/S/3/node1"),
        torchrun.Rendezvous(2, "10.0.0.1:12345", "10.0.0.2", hosts_store=False),
    )
    assert line[3:13] == [
        "--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:12345", "--rdzv-id=S-3",
        "--rdzv-conf=is_host=false", "--local-addr=10.0.0.2", "--max-restarts=0", "--monitor-interval=0.1",
        "--log-dir=/out/sweeps/S/3/node1",
    ]  # fmt: skip
    env = torchrun.environment(job(tp_size=4, dp_size=2), "row", {}, nodes=2)
    assert "GLOO_SOCKET_IFNAME" not in env
    assert "NCCL_SOCKET_IFNAME" not in env


ANSWERS = {
    "squeue": "7_0|RUNNING\n7_1|PENDING\n9|TIMEOUT\n",
    "sacct": "7_2|CANCELLED by 0\n7_3|COMPLETED\n",
}


def test_states_are_asked_of_the_queue_and_then_of_the_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(line: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(line, 0, ANSWERS[line[0]], "")

    monkeypatch.setattr(cluster.subprocess, "run", answer)
    assert states(["7_0", "7_2", "7_4", "9"]) == {"7_0": "RUNNING", "7_2": "CANCELLED", "7_4": "GONE", "9": "TIMEOUT"}


def test_a_queue_that_does_not_answer_says_nothing_of_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(line: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(line, 1, "", "slurm_load_jobs error: Unable to contact slurm controller")

    monkeypatch.setattr(cluster.subprocess, "run", answer)
    assert states(["7_0"]) == {}


@pytest.mark.parametrize(
    ("state", "status", "said"),
    [
        ("TIMEOUT", "timeout", "Slurm job 7_0 ended at Slurm's time limit (TIMEOUT)"),
        ("CANCELLED", "error", "because somebody cancelled it"),
        ("OUT_OF_MEMORY", "error", "more memory than it had asked for"),
        ("PREEMPTED", "error", "for another job"),
        ("NODE_FAIL", "error", "with its node"),
        ("FAILED", "error", "before it could write a row (FAILED)"),
        ("COMPLETED", "error", "before it could write a row (COMPLETED)"),
        ("GONE", "error", "Slurm does not know it any more"),
    ],
)
def test_a_job_that_ended_without_a_row_gets_one(state: str, status: str, said: str, tmp_path: Path) -> None:
    submitted = Submitted(_begun(tmp_path), "7_0")
    assert submitted.outcome("RUNNING") is None
    outcome = submitted.outcome(state)
    assert outcome is not None
    assert outcome.status == status
    assert said in str(outcome.reason)
    again = submitted.outcome("RUNNING")
    assert again is not None and again.row and outcome.row
    assert again.row["row_id"] == outcome.row["row_id"]


def test_a_cell_belongs_to_the_first_job_that_says_so(tmp_path: Path) -> None:
    assert record(tmp_path, "7_0")
    assert record(tmp_path, "7_0")
    assert not record(tmp_path, "8")
    assert [each.name for each in tmp_path.iterdir()] == ["slurm_job"]


def test_a_cell_whose_submission_is_in_doubt_is_taken_over(tmp_path: Path) -> None:
    """The launcher died as it submitted: should the job exist after all, it returns at once."""
    attempt = _begun(tmp_path)
    (attempt.folder.parent / "slurm").mkdir()
    assert list(left_behind([str(tmp_path)], {attempt.cell.job.key})) == []
    assert not record(attempt.folder, "7_0")
    assert (attempt.folder / "slurm_job").read_text() == NOBODY
    assert list(left_behind([str(tmp_path)], {attempt.cell.job.key})) == []


def test_only_what_has_no_row_is_left_behind(tmp_path: Path) -> None:
    attempt = _begun(tmp_path)
    (attempt.folder.parent / "slurm").mkdir()
    record(attempt.folder, "7_0")
    assert [each.job_id for each in left_behind([str(tmp_path)], {attempt.cell.job.key})] == ["7_0"]
    assert list(left_behind([str(tmp_path)], {"another"})) == []
    attempt.close("ok")
    assert list(unfinished(attempt.folder.parent)) == []


def test_of_a_try_that_was_given_up_nobody_makes_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = _begun(tmp_path)
    record(attempt.folder, "7_0")
    assert Submitted.find(attempt).wanted
    abandon(attempt.folder)
    assert Submitted.find(attempt).outcome("CANCELLED") is None
    monkeypatch.setattr(cluster.subprocess, "run", lambda *_, **__: pytest.fail("asked for the state of its job"))
    assert collect.main([str(attempt.folder.parent)]) == 3
    assert "no job runs it: run the sweep again with resume=true" in capsys.readouterr().out
    assert not attempt.has_row


def test_the_row_of_a_failed_try_is_taken_away_for_good(tmp_path: Path) -> None:
    attempt = _begun(tmp_path)
    record(attempt.folder, "7_0")
    _discard(attempt.close("error", "it failed"))
    assert not attempt.has_row
    assert Submitted.find(attempt).outcome("COMPLETED") is None


def test_the_job_of_a_try_that_was_given_up_is_ended_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another job's one day."""
    attempt = _begun(tmp_path)
    (attempt.folder.parent / "slurm").mkdir()
    record(attempt.folder, "7_0")
    _discard(attempt.close("error", "it failed"))
    asked: list[list[str]] = []

    def answer(line: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(line)
        return subprocess.CompletedProcess(line, 0, "7_0|COMPLETED\n", "")

    monkeypatch.setattr(cluster.subprocess, "run", answer)
    slurm = object.__new__(Slurm)  # whose making asks for a cluster
    slurm.adopted = {}
    assert slurm.recover([attempt.cell]) == {}
    assert [line[0] for line in asked] == ["squeue"]
    assert slurm.recover([attempt.cell]) == {}
    assert len(asked) == 1
    assert not attempt.has_row


def test_jobs_are_ended_once_none_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = iter(["7_0|RUNNING\n7_1|COMPLETED\n", "7_0|COMPLETING\n7_1|COMPLETED\n", "7_0|CANCELLED\n7_1|COMPLETED\n"])
    cancelled = []

    def answer(line: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if line[0] == "scancel":
            cancelled.append(line[1:])
            return subprocess.CompletedProcess(line, 0, "", "")
        return subprocess.CompletedProcess(line, 0, next(queue), "")

    monkeypatch.setattr(cluster, "POLL_S", 0)
    monkeypatch.setattr(cluster.subprocess, "run", answer)
    cluster.end(["7_0", "7_1"])
    assert cancelled == [["7_0"], ["7_0"]]
    assert next(queue, None) is None


def test_what_becomes_of_a_job_is_known_once_it_is_not_being_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = iter(["7_0|COMPLETING\n", "7_0|CANCELLED\n"])
    monkeypatch.setattr(cluster, "POLL_S", 0)
    monkeypatch.setattr(
        cluster.subprocess, "run", lambda line, **_: subprocess.CompletedProcess(line, 0, next(queue), "")
    )
    assert cluster.settled(["7_0"]) == {"7_0": "CANCELLED"}


def test_the_state_of_jobs_is_asked_where_slurm_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = _begun(tmp_path)
    record(attempt.folder, "7_0")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        collect.main([str(attempt.folder.parent)])
    assert "this needs Slurm's commands: there is no squeue here" in capsys.readouterr().err


def test_a_sweep_of_one_host_is_looked_at_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each cell the last try: what was begun anew alone, and what was tried again."""
    monkeypatch.setenv("PATH", str(tmp_path))
    crowded = _begun(tmp_path)
    alone = crowded.alone("memory ran out")
    alone.task.save(alone.task_file)
    alone.close("oom", "")
    sweep = crowded.folder.parent
    failed = Attempt.begin(cell(1, tmp_path), sweep, {}, number=1)
    again = Attempt.begin(cell(1, tmp_path), sweep, {}, number=2)
    for each in (failed, again):
        each.create_folder()
        each.task.save(each.task_file)
    _discard(failed.close("error", "it failed"))
    again.close("timeout", "")
    assert collect.main([str(sweep)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["0-alone", "1.2", "2 cells"]
    assert "2 cells: 2 done, 1 of them failed, 0 not done yet" in lines[-1]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (SweepOptions(reuse=True), "reuse=true: that is for one host"),
        (SweepOptions(parallel="auto"), "parallel=auto: that is for one host"),
        (SweepOptions(reuse=True, parallel="auto"), "reuse=true and parallel=auto: that is for one host"),
    ],
)
def test_what_is_for_one_host_is_refused(how: SweepOptions, said: str) -> None:
    with pytest.raises(JobError, match=said):
        Slurm(SlurmSettings(), how)


def test_cells_of_a_model_whose_folder_is_gone_are_collected_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their jobs were resolved when they were submitted."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    with initialize_config_dir(str(CONF), version_base=None):
        line = ["variant=fsdp", "shape=tiny_train_dp2", f"++model_dir={model}", f"output_dir={tmp_path}", "device=cpu"]
        values: Any = OmegaConf.to_container(compose("config", line))
    train = Cell(0, parse_job(values), None)
    shutil.rmtree(model)
    attempt = _begun(tmp_path, train)
    (attempt.folder.parent / "slurm").mkdir()
    record(attempt.folder, "7_0")
    assert [each.attempt.cell.job for each in left_behind([str(tmp_path)], {train.job.key})] == [train.job]
    attempt.close("error", "it broke")
    assert collect.main([str(attempt.folder.parent)]) == 1
    assert "model=model" in capsys.readouterr().out


def test_a_cell_that_cannot_be_understood_is_not_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only one that was cut off is, which never ran."""
    attempt = _begun(tmp_path)
    sweep = attempt.folder.parent
    (sweep / "slurm").mkdir()
    text = attempt.task_file.read_text()
    attempt.task_file.write_text(text[:100])
    with pytest.raises(SystemExit):
        collect.main([str(sweep)])
    assert "it holds no cells" in capsys.readouterr().err
    attempt.task_file.write_text(text.replace('"triton_tp"', '"of_another_time"'))
    with pytest.raises(SystemExit):
        collect.main([str(sweep)])
    assert re.search(r"0/task\.json cannot be understood: no variant is called of_another", capsys.readouterr().err)
    assert list(left_behind([str(tmp_path)], {"of another job"})) == []


def test_a_sweep_is_collected_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    attempt = _begun(Path("outputs"))
    attempt.close("skipped", "as it was measured")
    sweep = attempt.folder.parent.absolute()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert collect.main([str(sweep)]) == 0
    assert "0: " in (said := capsys.readouterr().out) and "skipped as it was measured" in said
    assert list((tmp_path / "elsewhere").iterdir()) == []


MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 128,
}  # fmt: skip


def _begun(output_dir: Path, of: Cell | None = None) -> Attempt:
    sweep = output_dir / "sweeps" / "S"
    sweep.mkdir(parents=True)
    attempt = Attempt.begin(of or cell(0, output_dir), sweep, {}, number=1)
    attempt.create_folder()
    attempt.task.save(attempt.task_file)
    return attempt


def _discard(outcome: Outcome) -> None:
    assert outcome.row is not None
    discard_rows(outcome.cell.job.output_dir, [outcome.row])
