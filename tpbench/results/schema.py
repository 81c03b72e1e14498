"""The schema of rows: columns, types, version and the statuses of a cell.

The columns stand in their order. A workload adds further columns (`Workload.row_columns`).
"""

import datetime
from typing import Any

import pyarrow as pa

from tpbench.columns import Column
from tpbench.measure.clocks import sample_columns, statistics_columns
from tpbench.workloads import cached_until_registered, workloads

TEXT = pa.string()
INT = pa.int64()
REAL = pa.float64()
FLAG = pa.bool_()
TIME = pa.timestamp("us", tz="UTC")
REALS = pa.list_(pa.float64())

_TYPES = {bool: FLAG, int: INT, float: REAL, str: TEXT, datetime.datetime: TIME, list: REALS, object: pa.null()}
"""Arrow's types by those of columns. A type that is known from a value only is Arrow's null until then."""

COLUMNS = (
    # Which cell this is.
    Column("row_id", str, "unique name of this row; its file is rows/ROW_ID.parquet"),
    Column("sweep_id", str, "the sweep that made this row"),
    Column("cell", int, "index of the cell in its sweep, from 0"),
    Column("key", str, "hash of the resolved job: equal jobs have equal keys"),
    Column("workload", str, "the workload: the kind of problem"),
    Column("variant", str, "the implementation"),
    Column("status", str, "how the cell ended: ok, oom, wrong, timeout, error or skipped"),
    Column("reason", str, "why the status is not ok"),
    # The problem.
    Column("tokens", int, "rows of logits, or tokens, per data-parallel replica"),
    Column("vocab", int, "columns over all tensor-parallel ranks"),
    Column("tp_size", int, "tensor-parallel ranks"),
    Column("dp_size", int, "data-parallel replicas"),
    Column("world_size", int, "ranks in all"),
    Column("loss", str, "the loss function"),
    Column("block_cap", str, "largest column block that a kernel may use: auto or a number"),
    Column("dtype", str, "dtype of the inputs"),
    Column("device", str, "cuda or cpu"),
    Column("interpreted", bool, "true if kernels ran in Triton's interpreter: correct, but no measurement"),
    Column("graph", bool, "true if device times are of a replayed CUDA graph"),
    Column("fresh", bool, "true if the inputs changed before every timed iteration"),
    # The times of an iteration.
    *statistics_columns(),
    Column("launch_ms", float, "host time of a step's call on the slowest rank, median; null on CPUs", better=-1),
    Column("skew_ms", float, "slowest minus fastest rank of an iteration, median", better=0),
    Column("iterations", int, "iterations timed by wall clock", better=0),
    Column("chained_copies", int, "copies of the inputs through which the iterations of chained_ms rotate"),
    Column("not_chained", str, "why there is no chained_ms"),
    Column("triton_compile_s", float, "time in Triton's compiler before the iterations, on the slowest rank", "s"),
    Column("torch_compile_s", float, "time in torch.compile before the iterations, on the slowest rank", "s"),
    Column("warmed_up", bool, "false: one pass served as warm-up, check and time"),
    # Hardware limits.
    Column("floor_ms", float, "least time of the unavoidable bytes, FLOPs and transfers, at measured rates", better=0),
    Column("fraction_of_floor", float, "floor_ms over device_ms (on a CPU over time_ms)", better=1, percent=True),
    Column("datasheet_share", float, "gb_per_s over the bandwidth of the GPU's datasheet", better=1, percent=True),
    Column("gb_per_s", float, "bytes_moved over device_ms (on a CPU over time_ms)", better=1),
    Column("copy_gb_per_s", float, "copy bandwidth measured on this machine, reads and writes counted", better=0),
    Column("bytes_moved", int, "unavoidable bytes through the memory of the busiest rank, counted", "bytes", better=-1),
    Column("bytes_communicated", int, "bytes that the busiest rank sends in an iteration, counted", "bytes", better=-1),
    Column("flops", int, "floating-point operations of the busiest rank in an iteration, counted", "FLOP", better=0),
    # Bottleneck of an iteration, from a trace after the timed iterations. Null on a CPU.
    Column("compute_share", float, "share of time_ms with a kernel or copy that isn't communication", percent=True),
    Column("communication_share", float, "share of time_ms with only communication or waits for peers", percent=True),
    Column("idle_share", float, "share of time_ms without work; without a trace by device_ms", percent=True),
    Column("bound", str, "bottleneck: host, wire, compute or memory"),
    # Memory.
    Column("peak_gib", float, "extra peak memory of an iteration, maximum over ranks", better=-1),
    Column("rank_peak_gib", list, "extra peak memory of an iteration on each rank"),
    Column("iteration_held_gib", list, "memory held at the end of each iteration, maximum over ranks"),
    Column("iteration_peak_gib", list, "extra peak memory of each iteration, maximum over ranks"),
    Column("memory_limit_gib", float, "memory limit of each rank", better=0),
    Column("oom_bytes", int, "size of the allocation that failed", "bytes"),
    Column("oom_rank", int, "first rank that ran out of memory"),
    # Comparison with the oracle.
    Column("loss_value", float, "mean loss over the rows that count", better=0),
    Column("loss_error", float, "error of the mean loss against the float64 oracle (0.1: of rows)", better=0),
    Column("grad_error", float, "error of the gradient against the float64 oracle", better=0),
    Column("output_error", float, "largest relative error of a row of an output against the float64 oracle", better=0),
    # The samples of these times.
    *sample_columns(),
    # Time and versions.
    Column("started_at", datetime.datetime, "start of the job, UTC"),
    Column("finished_at", datetime.datetime, "end of the job, UTC"),
    Column("wall_s", float, "duration of the whole job, including the start of processes", "s", better=0),
    Column("start_s", float, "part of wall_s before the variant is set up: processes, torch and their group", "s"),
    Column("schema_version", int, "version of these columns"),
    Column("tpbench_version", str, "version of tpbench"),
    Column("kernels_version", str, "version of the kernels of tpbench that ran: a hash of their code; null: none ran"),
    Column("variant_version", str, "hash of the file of a variant from outside tpbench; null: a variant of tpbench"),
    Column("workload_definition", str, "JSON of a user's workload: title and fields; null: a workload of tpbench"),
    Column("package_versions", str, "packages that the variant requires, with their versions; null: none"),
    Column("git_commit", str, "commit of the checkout of tpbench"),
    Column("git_dirty", bool, "true if the checkout of tpbench had uncommitted changes"),
    Column("user_commit", str, "commit of the git repository with the variant's file, or in which the command ran"),
    # Hardware and software.
    Column("host", str, "name of the first node"),
    Column("nodes", int, "number of nodes"),
    Column("backend", str, "communication backend: nccl or gloo"),
    Column("gpu_name", str, "GPU model"),
    Column("gpu_count", int, "GPUs of the first node"),
    Column("driver_version", str, "NVIDIA driver"),
    Column("cuda_version", str, "CUDA that torch was built with"),
    Column("nccl_version", str, "NCCL"),
    Column("torch_version", str, "torch"),
    Column("triton_version", str, "triton"),
    Column("python_version", str, "Python"),
    Column("os", str, "operating system and kernel"),
    Column("cpu_model", str, "CPU model"),
    Column("cpu_count", int, "CPU cores that the job could use"),
    Column("memory_gib", float, "main memory of the first node"),
    Column("sm_clock_mhz", float, "clock of the GPU's multiprocessors while it measured", "MHz"),
    Column("memory_clock_mhz", float, "clock of the GPU's memory while it measured", "MHz"),
    Column("throttle_reasons", str, "why a rank's GPU lowered its clocks while it measured, or none; null: unknown"),
    # How the cell ran.
    Column("beside", str, "another-sweep if another sweep had GPUs of this host, or other GPUs of it had work"),
    Column("interleaved", str, "name of the group of cells that were interleaved with this one"),
    Column("interleaved_cells", int, "number of cells that were interleaved in one torchrun"),
    Column("not_interleaved", str, "why a cell of an order=interleaved sweep was not interleaved"),
    Column("warm", bool, "true if the torchrun had run other jobs before"),
    Column("jobs_before", int, "jobs that the same processes measured before"),
    Column("command", str, "command line of torchrun"),
    Column("environment", str, "JSON of the environment variables that influence a measurement"),
    Column("overrides", str, "arguments of a command line that make this cell"),
    Column("job", str, "JSON of the resolved job"),
    Column("trace", str, "Chrome traces of an iteration in the folder of the logs, a file for each rank; null: none"),
    Column("log_dir", str, "folder of the job's logs, relative to the output folder if it is inside"),
)

COMMON_COLUMNS = {column.name: column for column in COLUMNS}
"""The columns of every row, by name, in order."""

SCHEMA_VERSION = 2
"""Increased if a column is renamed or retyped, not if one is added or removed. Files of older versions are not read."""

MARKER = b"tpbench.schema_version"
"""Key in a Parquet file's metadata: it marks the file as tpbench's and holds the version of its schema."""

COLUMN_LIST = "python -m tpbench docs columns"
"""The command that prints the description of every column."""

STATUSES = {
    "ok": "correct and measured",
    "oom": "a rank ran out of memory",
    "wrong": "differs from the oracle, and so has no time",
    "timeout": "took longer than a job may",
    "error": "a rank or its launch failed",
    "skipped": "cannot run on this machine",
}


class RowError(ValueError):
    """A row does not fit the schema. The message names the column."""


@cached_until_registered
def workload_columns() -> dict[str, dict[str, Column]]:
    """Return the columns that each workload adds."""
    return {
        name: {column.name: column for column in workload.row_columns if column.name not in COMMON_COLUMNS}
        for name, workload in workloads().items()
    }


@cached_until_registered
def all_columns() -> dict[str, Column]:
    """Return every column of a frame of rows: the common ones, then those of each workload."""
    columns: dict[str, Column] = {}
    for added in (COMMON_COLUMNS, *workload_columns().values()):
        columns |= {name: column for name, column in added.items() if name not in columns}
    return columns


def arrow_type(column: Column) -> pa.DataType:
    """Return the Arrow type of a column, which is null if only a value has the type."""
    return _TYPES[column.type]


def type_of(value: Any) -> pa.DataType | None:
    """Return the Arrow type for a value, or None if columns have no such type."""
    if isinstance(value, (list, tuple)):
        numbers = all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in value)
        return REALS if numbers else None
    if isinstance(value, datetime.datetime):
        return TIME if value.tzinfo else None
    return next((_TYPES[cls] for cls in (bool, int, float, str) if isinstance(value, cls)), None)
