"""Slurm's partition, the placement of ranks on nodes, and the answers of Slurm's commands. Needs no Slurm."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.planned_jobs import job
from tests.support.slurm_commands import SlurmCommands
from tpbench.launcher.options import SlurmSettings
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.cluster import Layout, Partition, rejection_message, states
from tpbench.settings import JobError


def test_a_rejection_is_one_line() -> None:
    limit = "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates\n"
    message = rejection_message(limit)
    assert message.endswith(": AssocMaxSubmitJobLimit; Batch job submission failed: Job violates")
    assert rejection_message("sbatch: error: Invalid feature specification").endswith("Invalid feature specification")


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"tp_size": 16}, "needs 16 GPUs of one node, a node has 8"),
        ({"tp_size": 8, "dp_size": 2}, None),
        ({"tp_size": 4, "dp_size": 5}, "needs 5 nodes, the partition has 2"),
        ({"tp_size": 4, "dp_size": 32, "device": "cpu"}, None),
        ({"tp_size": 4, "dp_size": 33, "device": "cpu"}, "needs 3 nodes, the partition has 2"),
    ],
)
def test_a_job_that_is_too_big_for_the_partition_is_skipped(sizes: dict[str, Any], reason: str | None) -> None:
    assert Partition(gpus_per_node=8, cores_per_node=64, nodes=2).skip_reason(job(**sizes)) == reason


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
    target = Partition(gpus_per_node=per_node, cores_per_node=64, nodes=8)
    assert target.layout(job(tp_size=tp_size, dp_size=dp_size)) == Layout(nodes, ranks, "cuda")


ALL = """case "$*" in
*--format=%R*) echo gpu; echo cpu;;
*--partition=nosuch*) ;;
*) echo 'gpu|8|64|gpu:h100:8(S:0-1),gpu:mig:2'; echo 'gpu|2|32+|(null)'
   case "$*" in *--partition*) ;; *) echo 'cpu*|12|16|(null)';; esac;;
esac"""


def test_a_partition_is_read_from_sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = SlurmCommands(tmp_path, monkeypatch, sinfo=ALL)
    monkeypatch.setattr("tpbench.measure.machine.version", lambda name: "2.13.0")  # a torch for GPUs
    assert Partition.find(SlurmSettings()) == Partition(10, 64, nodes=12)
    assert Partition.find(SlurmSettings(partition="gpu")) == Partition(10, 64, nodes=10)
    with pytest.raises(JobError, match="called nosuch"):
        Partition.find(SlurmSettings(partition="nosuch"))
    Partition.find(SlurmSettings(cpus_per_task=65))  # `32+` may be 128
    slurm.answer(sinfo="echo 'cpu*|12|16|(null)'")
    with pytest.raises(JobError, match="cpus_per_task=17: the largest node has 16 CPUs"):
        Partition.find(SlurmSettings(cpus_per_task=17))
    slurm.answer(sinfo="echo no controller >&2; exit 1")
    with pytest.raises(JobError, match="none answers: sinfo says no controller"):
        Partition.find(SlurmSettings())


def test_a_line_names_the_command_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    SlurmCommands(tmp_path, monkeypatch, sinfo=f"exec {shutil.which('sleep')} 600")
    monkeypatch.setattr(cluster, "QUIET_S", 0.1)
    monkeypatch.setattr(cluster, "ANSWER_S", 1.0)
    with pytest.raises(JobError, match="sinfo says nothing in 1 s"):
        Partition.find(SlurmSettings())
    assert "sinfo of Slurm has not answered for 0 s" in capsys.readouterr().err


def test_states_come_from_the_queue_and_then_from_the_accounting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = "echo '7_0|RUNNING (None)'; echo '7_1|PENDING (BeginTime)'; echo '9|TIMEOUT'"
    SlurmCommands(tmp_path, monkeypatch, squeue=squeue, sacct="echo '7_2|CANCELLED by 0'; echo '7_3|COMPLETED'")
    known = {"7_0": "RUNNING", "7_1": "PENDING (BeginTime)", "7_2": "CANCELLED", "7_4": "GONE", "9": "TIMEOUT"}
    assert states(known) == known


def test_without_an_answer_of_the_queue_no_state_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SlurmCommands(tmp_path, monkeypatch, squeue="echo Unable to contact slurm controller >&2; exit 1")
    assert states(["7_0"]) == {}
