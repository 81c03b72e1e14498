"""Slurm's partition, the placement of ranks on nodes, and the answers of Slurm's commands. Needs no Slurm."""

import subprocess
from typing import Any

import pytest

from tests.support.planned_jobs import job
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.cluster import Layout, Partition, SlurmSettings, states
from tpbench.settings import JobError


def test_a_rejection_is_one_line() -> None:
    said = cluster.rejection_message(
        "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates "
        "accounting/QOS policy (job submit limit, user's size and/or time limits)\n"
    )
    assert said.startswith("Slurm rejects the jobs: AssocMaxSubmitJobLimit; Batch job submission failed: Job")
    assert "use hydra.launcher.cells_per_job" in said and "\n" not in said
    other = cluster.rejection_message("sbatch: error: Batch job submission failed: Invalid feature specification")
    assert other.endswith("Invalid feature specification")


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


@pytest.mark.parametrize(("name", "nodes"), [(None, 12), ("gpu", 10)])
def test_a_partition_is_read_from_sinfo(name: str | None, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*line: str) -> subprocess.CompletedProcess[str]:
        said = "gpu|8|64|gpu:h100:8(S:0-1),gpu:mig:2\ngpu|2|32+|(null)\n"
        return subprocess.CompletedProcess(line, 0, said if name else f"{said}cpu*|12|16|(null)\n", "")

    monkeypatch.setattr(cluster, "answer", answer)
    monkeypatch.setattr(cluster.machine, "version", lambda name: "2.13.0")
    assert Partition.find(SlurmSettings(partition=name)) == Partition(10, 64, nodes)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, "needs a Slurm cluster, and none answers: sinfo says controller; use a login"),
        (0, r"called gpuu, did you mean gpu\?"),
    ],
)
def test_a_partition_that_cannot_be_found(code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(
            line, code, "" if line[-1].startswith("--part") else "gpu\ncpu\n", "no\ncontroller"
        )

    monkeypatch.setattr(cluster, "answer", answer)
    with pytest.raises(JobError, match=said):
        Partition.find(SlurmSettings(partition="gpuu"))


ANSWERS = {
    "squeue": "7_0|RUNNING\n7_1|PENDING\n9|TIMEOUT\n",
    "sacct": "7_2|CANCELLED by 0\n7_3|COMPLETED\n",
}


def test_states_come_from_the_queue_and_then_from_the_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(line, 0, ANSWERS[line[0]], "")

    monkeypatch.setattr(cluster, "answer", answer)
    assert states(["7_0", "7_2", "7_4", "9"]) == {"7_0": "RUNNING", "7_2": "CANCELLED", "7_4": "GONE", "9": "TIMEOUT"}


def test_without_an_answer_of_the_queue_no_state_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(line, 1, "", "slurm_load_jobs error: Unable to contact slurm controller")

    monkeypatch.setattr(cluster, "answer", answer)
    assert states(["7_0"]) == {}
