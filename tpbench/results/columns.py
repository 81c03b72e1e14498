"""The columns of every row, in order. A workload adds further columns (`Workload.row_columns`)."""

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
    """One column of a row: its name, its Arrow type, its meaning, and its unit if it has one."""

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
    Column("workload", TEXT, "the workload: the kind of problem"),
    Column("variant", TEXT, "the implementation"),
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
    Column(
        "interpreted",
        FLAG,
        "true if kernels ran in Triton's interpreter: results are correct, times are no measurement",
    ),
    Column("graph", FLAG, "true if device times are of a replayed CUDA graph"),
    Column("fresh", FLAG, "true if the inputs changed before every timed iteration"),
    # Wall time of an iteration: from the barrier of all ranks to the end of the last rank.
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
    Column(
        "launch_ms",
        REAL,
        "host time of an iteration on the slowest rank, from the call of the step until it returns, median; with waits "
        "for the device within the step; null on a CPU, where the step itself computes",
        "ms",
    ),
    Column("skew_ms", REAL, "slowest minus fastest rank of an iteration, median", "ms"),
    Column("iterations", INT, "iterations timed by wall clock"),
    Column("warmed_up", FLAG, "false: one pass served as warm-up, check and time"),
    # Hardware limits.
    Column(
        "floor_ms",
        REAL,
        "least possible time: of the unavoidable bytes, of the FLOPs or of the wire, at measured rates",
        "ms",
    ),
    Column("fraction_of_floor", REAL, "floor_ms over device_ms (on a CPU over time_ms)"),
    Column("gb_per_s", REAL, "bytes_moved over device_ms (on a CPU over time_ms)", "GB/s"),
    Column("copy_gb_per_s", REAL, "copy bandwidth measured on this machine, reads and writes counted", "GB/s"),
    Column("bytes_moved", INT, "unavoidable bytes through the memory of the busiest rank, counted", "bytes"),
    Column("bytes_communicated", INT, "bytes that the busiest rank sends in an iteration, counted", "bytes"),
    Column("flops", INT, "floating-point operations of the busiest rank in an iteration, counted", "FLOP"),
    # Bottleneck of an iteration, from a trace after the timed iterations. Null on a CPU.
    Column(
        "compute_share",
        REAL,
        "share of time_ms in which a kernel or copy runs that is no communication; without a trace by both clocks, or "
        "null if they do not tell; a trace needs CUPTI and, unless the workload profiles by itself, reuse=false",
    ),
    Column(
        "communication_share",
        REAL,
        "share of time_ms in which the device only communicates: NCCL kernels, copies between GPUs, waiting for peers; "
        "null as compute_share",
    ),
    Column("idle_share", REAL, "share of time_ms in which the device runs nothing; without a trace by device_ms"),
    Column(
        "bound",
        TEXT,
        "bottleneck. host: idle_share above 0.2; else wire: communication_share above compute_share; "
        "else compute or memory: the longer of the times of flops and of bytes_moved at measured rates",
    ),
    Column(
        "energy_j",
        REAL,
        "energy of the GPUs in an iteration, summed over ranks, from about 1 s of iterations without cold caches; "
        "null without NVML's energy counter",
        "J",
    ),
    # Memory.
    Column("peak_gib", REAL, "extra peak memory of an iteration, maximum over ranks", "GiB"),
    Column("rank_peak_gib", REALS, "extra peak memory of an iteration on each rank", "GiB"),
    Column("iteration_held_gib", REALS, "memory held at the end of each iteration, maximum over ranks", "GiB"),
    Column("iteration_peak_gib", REALS, "extra peak memory of each iteration, maximum over ranks", "GiB"),
    Column("memory_limit_gib", REAL, "memory limit of each rank", "GiB"),
    Column("oom_bytes", INT, "size of the allocation that failed", "bytes"),
    Column("oom_rank", INT, "first rank that ran out of memory"),
    # Comparison with the oracle.
    Column("loss_value", REAL, "mean loss over the rows that count"),
    Column("loss_error", REAL, "largest error of a row's loss against the float64 oracle"),
    Column("grad_error", REAL, "error of the gradient against the float64 oracle"),
    # The samples of the statistics.
    Column("samples_ms", REALS, "wall time of every iteration", "ms"),
    Column("device_samples_ms", REALS, "device time of every iteration", "ms"),
    Column("round_ms", REALS, "wall time of an iteration, median of each round of an interleaved cell", "ms"),
    Column("device_round_ms", REALS, "device time of an iteration, median of each such round", "ms"),
    # Time and versions.
    Column("started_at", TIME, "start of the job, UTC"),
    Column("finished_at", TIME, "end of the job, UTC"),
    Column("wall_s", REAL, "duration of the whole job, including the start of processes", "s"),
    Column("schema_version", INT, "version of these columns"),
    Column("tpbench_version", TEXT, "version of tpbench"),
    Column("kernels_version", TEXT, "version of the kernels of tpbench that ran: a hash of their code; null: none ran"),
    Column("variant_version", TEXT, "hash of the file of a variant from outside tpbench; null: a variant of tpbench"),
    Column("package_versions", TEXT, "packages that the variant requires, with their versions; null: none"),
    Column("git_commit", TEXT, "commit of the checkout"),
    Column("git_dirty", FLAG, "true if the checkout had uncommitted changes"),
    # Hardware and software.
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
    Column(
        "throttle_reasons",
        TEXT,
        "why a rank's GPU lowered its clocks while it measured: power, thermal, sync_boost, board_limit, reliability, "
        "power_brake, hw_slowdown; none: it did not; null: NVML does not say",
    ),
    # How the cell ran.
    Column("tries", INT, "attempts of this sweep at the cell; the row is of the last one"),
    Column("beside", TEXT, "rows of the jobs that ran on this host at the same time; null: none"),
    Column("interleaved", TEXT, "name of the group of cells that were interleaved with this one"),
    Column("interleaved_cells", INT, "number of cells that were interleaved in one torchrun"),
    Column("not_interleaved", TEXT, "why a cell of an order=interleaved sweep was not interleaved"),
    Column("warm", FLAG, "true if the torchrun had run other jobs before"),
    Column("jobs_before", INT, "jobs that the same processes measured before"),
    Column("command", TEXT, "command line of torchrun"),
    Column("environment", TEXT, "JSON of the environment variables that influence a measurement"),
    Column("job", TEXT, "JSON of the resolved job"),
    Column("log_dir", TEXT, "folder of the job's logs, relative to the output folder if it is inside"),
)
