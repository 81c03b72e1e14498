"""The columns that every row has, in order. A workload adds its own (`Workload.columns`)."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

TEXT = pa.string()
INT = pa.int64()
REAL = pa.float64()
FLAG = pa.bool_()
TIME = pa.timestamp("us", tz="UTC")
REALS = pa.list_(pa.float64())


@dataclass(frozen=True)
class Column:
    """One column of a row: its name, its Arrow type, what it is, and its unit where it has one."""

    name: str
    type: pa.DataType
    doc: str
    unit: str = ""


COLUMNS = (
    # Which cell this is.
    Column("row_id", TEXT, "unique name of this row; its file is rows/ROW_ID.parquet"),
    Column("sweep_id", TEXT, "the sweep that made this row"),
    Column("cell", INT, "index of the cell in its sweep, from 0"),
    Column("key", TEXT, "hash of the resolved job: equal jobs have equal keys"),
    Column("workload", TEXT, "the problem that was solved"),
    Column("variant", TEXT, "the implementation that solved it"),
    Column("status", TEXT, "how the cell ended: ok, oom, wrong, timeout, error or skipped"),
    Column("reason", TEXT, "why the status is not ok"),
    # The problem.
    Column("tokens", INT, "rows of logits, or tokens, per data-parallel replica"),
    Column("vocab", INT, "columns over all tensor-parallel ranks"),
    Column("tp_size", INT, "tensor-parallel ranks"),
    Column("dp_size", INT, "data-parallel replicas"),
    Column("world_size", INT, "ranks in all"),
    Column("loss", TEXT, "the loss function"),
    Column("block_cap", TEXT, "largest column block that a kernel may use: auto or a number"),
    Column("dtype", TEXT, "dtype of the inputs"),
    Column("device", TEXT, "cuda or cpu"),
    Column("interpreted", FLAG, "kernels ran in Triton's interpreter: right, but no measurement"),
    Column("graph", FLAG, "device times are of a replayed CUDA graph"),
    # Wall time of an iteration: from all ranks lined up to the last rank done.
    Column("time_ms", REAL, "wall time of an iteration, median", "ms"),
    Column("time_p5_ms", REAL, "wall time, 5th percentile", "ms"),
    Column("time_p95_ms", REAL, "wall time, 95th percentile", "ms"),
    Column("time_min_ms", REAL, "wall time, minimum", "ms"),
    Column("time_ci_low_ms", REAL, "wall time, lower end of the median's 95% confidence interval", "ms"),
    Column("time_ci_high_ms", REAL, "wall time, upper end of the median's 95% confidence interval", "ms"),
    # The same region by device events, with launches queued ahead.
    Column("device_ms", REAL, "device time of an iteration on the slowest rank, median", "ms"),
    Column("device_p5_ms", REAL, "device time, 5th percentile", "ms"),
    Column("device_p95_ms", REAL, "device time, 95th percentile", "ms"),
    Column("device_min_ms", REAL, "device time, minimum", "ms"),
    Column("device_ci_low_ms", REAL, "device time, lower end of the median's 95% confidence interval", "ms"),
    Column("device_ci_high_ms", REAL, "device time, upper end of the median's 95% confidence interval", "ms"),
    Column("skew_ms", REAL, "slowest minus fastest rank of an iteration, median", "ms"),
    Column("iterations", INT, "iterations timed by wall clock"),
    Column("warmed_up", FLAG, "false: one pass served as warm-up, check and time"),
    # What the hardware allows.
    Column("floor_ms", REAL, "time that the unavoidable bytes take at this machine's copy bandwidth", "ms"),
    Column("fraction_of_floor", REAL, "share of the possible speed reached: floor over measured time"),
    Column("gb_per_s", REAL, "unavoidable bytes over measured time", "GB/s"),
    Column("copy_gb_per_s", REAL, "copy bandwidth measured on this machine, reads and writes counted", "GB/s"),
    Column("bytes_moved", INT, "bytes through the busiest rank's memory that cannot be avoided, by count", "bytes"),
    Column("bytes_communicated", INT, "bytes that the busiest rank sends in an iteration, by count", "bytes"),
    Column("flops", INT, "floating-point operations of the busiest rank in an iteration, by count", "FLOP"),
    # Memory.
    Column("peak_gib", REAL, "extra peak memory of an iteration on the hungriest rank", "GiB"),
    Column("rank_peak_gib", REALS, "extra peak memory of an iteration on each rank", "GiB"),
    Column("memory_limit_gib", REAL, "memory that each rank was allowed", "GiB"),
    Column("oom_bytes", INT, "bytes that were asked for when memory ran out", "bytes"),
    Column("oom_rank", INT, "first rank whose memory ran out"),
    # What the oracle said.
    Column("loss_value", REAL, "mean loss over the rows that count"),
    Column("loss_error", REAL, "largest error of a row's loss against the float64 oracle"),
    Column("grad_error", REAL, "error of the gradient against the float64 oracle"),
    # The samples that the statistics are made from.
    Column("samples_ms", REALS, "wall time of every iteration", "ms"),
    Column("device_samples_ms", REALS, "device time of every iteration", "ms"),
    Column("round_ms", REALS, "wall time of an iteration, median of each round of an interleaved cell", "ms"),
    Column("device_round_ms", REALS, "device time of an iteration, median of each such round", "ms"),
    # When, by what, from which source.
    Column("started_at", TIME, "start of the job, UTC"),
    Column("finished_at", TIME, "end of the job, UTC"),
    Column("wall_s", REAL, "the whole job, starting of processes included", "s"),
    Column("schema_version", INT, "version of these columns"),
    Column("tpbench_version", TEXT, "version of tpbench"),
    Column("kernels_version", TEXT, "version of tpbench's kernels: changes with their source"),
    Column("git_commit", TEXT, "commit of the checkout that ran"),
    Column("git_dirty", FLAG, "the checkout had uncommitted changes"),
    # What it ran on.
    Column("host", TEXT, "name of the first node"),
    Column("nodes", INT, "number of nodes"),
    Column("backend", TEXT, "communication backend: nccl or gloo"),
    Column("gpu_name", TEXT, "GPU model"),
    Column("gpu_count", INT, "GPUs of the first node"),
    Column("driver_version", TEXT, "NVIDIA driver"),
    Column("cuda_version", TEXT, "CUDA that torch was built with"),
    Column("nccl_version", TEXT, "NCCL"),
    Column("torch_version", TEXT, "torch"),
    Column("triton_version", TEXT, "triton"),
    Column("python_version", TEXT, "Python"),
    Column("os", TEXT, "operating system and kernel"),
    Column("cpu_model", TEXT, "CPU model"),
    Column("cpu_count", INT, "CPU cores that the job could use"),
    Column("memory_gib", REAL, "main memory of the first node", "GiB"),
    Column("sm_clock_mhz", REAL, "clock of the GPU's multiprocessors while it measured", "MHz"),
    Column("memory_clock_mhz", REAL, "clock of the GPU's memory while it measured", "MHz"),
    # How to do it again.
    Column("tries", INT, "times that this sweep started the cell; the row is of the last"),
    Column("beside", TEXT, "rows of the jobs that ran on this host at the same time; null: it was alone"),
    Column("interleaved", TEXT, "the cells that were measured in turns with this one have the same name here"),
    Column("interleaved_cells", INT, "cells that took turns, each with processes and memory of its own"),
    Column("not_interleaved", TEXT, "why a cell of an order=interleaved sweep was measured in one go"),
    Column("warm", FLAG, "the torchrun had run other jobs before"),
    Column("jobs_before", INT, "jobs that the same processes had measured before; 0: they were forked for this one"),
    Column("command", TEXT, "the torchrun line"),
    Column("environment", TEXT, "JSON of those environment variables that bear on a measurement"),
    Column("job", TEXT, "JSON of the resolved job"),
    Column("log_dir", TEXT, "folder of the job's logs, relative to the output folder where it lies within"),
)
