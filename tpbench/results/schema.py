"""The schema of rows: columns, types, version and the statuses of a cell.

The columns stand in their order. A workload adds further columns (`Workload.row_columns`).
"""

import datetime
import re
import types
import typing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tpbench.measure.clocks import CLOCKS, list_columns, statistics_columns
from tpbench.workloads import Workload, cached_until_registered, workloads

TEXT = pa.string()
INT = pa.int64()
REAL = pa.float64()
FLAG = pa.bool_()
TIME = pa.timestamp("us", tz="UTC")
REALS = pa.list_(pa.float64())

_NAMED_UNITS = {"gb_per_s": "GB/s", "_ms": "ms", "_kib": "KiB", "_mib": "MiB", "_gib": "GiB"}
"""Units by the end of a column's name."""


@dataclass(frozen=True)
class Column:
    """One column of a row: its name, its Arrow type, its meaning, and its unit if it has one."""

    name: str
    type: pa.DataType
    doc: str
    unit: str = ""
    """By default the unit that the name ends with."""

    def __post_init__(self) -> None:
        unit = next((unit for end, unit in _NAMED_UNITS.items() if self.name.endswith(end)), "")
        object.__setattr__(self, "unit", self.unit or unit)


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
    Column("interpreted", FLAG, "true if kernels ran in Triton's interpreter: correct, but no measurement"),
    Column("graph", FLAG, "true if device times are of a replayed CUDA graph"),
    Column("fresh", FLAG, "true if the inputs changed before every timed iteration"),
    # The times of an iteration.
    *(Column(name, REAL, doc) for name, doc in statistics_columns().items()),
    Column("launch_ms", REAL, "host time of a step's call on the slowest rank, with its waits, median; null on CPUs"),
    Column("skew_ms", REAL, "slowest minus fastest rank of an iteration, median"),
    Column("iterations", INT, "iterations timed by wall clock"),
    Column("chained_copies", INT, "copies of the inputs through which the iterations of chained_ms rotate"),
    Column("not_chained", TEXT, "why there is no chained_ms"),
    Column("triton_compile_s", REAL, "time in Triton's compiler before the timed iterations, on the slowest rank", "s"),
    Column("torch_compile_s", REAL, "time in torch.compile before the timed iterations, on the slowest rank", "s"),
    Column("warmed_up", FLAG, "false: one pass served as warm-up, check and time"),
    # Hardware limits.
    Column("floor_ms", REAL, "least time of the unavoidable bytes, FLOPs and transfers, at measured rates"),
    Column("fraction_of_floor", REAL, "floor_ms over device_ms (on a CPU over time_ms)"),
    Column("gb_per_s", REAL, "bytes_moved over device_ms (on a CPU over time_ms)"),
    Column("copy_gb_per_s", REAL, "copy bandwidth measured on this machine, reads and writes counted"),
    Column("bytes_moved", INT, "unavoidable bytes through the memory of the busiest rank, counted", "bytes"),
    Column("bytes_communicated", INT, "bytes that the busiest rank sends in an iteration, counted", "bytes"),
    Column("flops", INT, "floating-point operations of the busiest rank in an iteration, counted", "FLOP"),
    # Bottleneck of an iteration, from a trace after the timed iterations. Null on a CPU.
    Column("compute_share", REAL, "share of time_ms in which a kernel or copy runs that is no communication"),
    Column("communication_share", REAL, "share of time_ms in which the device only communicates or waits for peers"),
    Column("idle_share", REAL, "share of time_ms in which the device runs nothing; without a trace by device_ms"),
    Column("bound", TEXT, "bottleneck: host, wire, compute or memory"),
    # Memory.
    Column("peak_gib", REAL, "extra peak memory of an iteration, maximum over ranks"),
    Column("rank_peak_gib", REALS, "extra peak memory of an iteration on each rank"),
    Column("iteration_held_gib", REALS, "memory held at the end of each iteration, maximum over ranks"),
    Column("iteration_peak_gib", REALS, "extra peak memory of each iteration, maximum over ranks"),
    Column("memory_limit_gib", REAL, "memory limit of each rank"),
    Column("oom_bytes", INT, "size of the allocation that failed", "bytes"),
    Column("oom_rank", INT, "first rank that ran out of memory"),
    # Comparison with the oracle.
    Column("loss_value", REAL, "mean loss over the rows that count"),
    Column("loss_error", REAL, "largest error of a row's loss against the float64 oracle"),
    Column("grad_error", REAL, "error of the gradient against the float64 oracle"),
    Column("output_error", REAL, "largest relative error of a row of an output against the float64 oracle"),
    # The samples of these times.
    *(Column(name, REALS, doc) for name, doc in list_columns().items()),
    *(Column(name, REAL, doc) for clock in CLOCKS for name, doc in clock.numbers.items()),
    # Time and versions.
    Column("started_at", TIME, "start of the job, UTC"),
    Column("finished_at", TIME, "end of the job, UTC"),
    Column("wall_s", REAL, "duration of the whole job, including the start of processes", "s"),
    Column("start_s", REAL, "part of wall_s before the variant is set up: processes, torch and their group", "s"),
    Column("schema_version", INT, "version of these columns"),
    Column("tpbench_version", TEXT, "version of tpbench"),
    Column("kernels_version", TEXT, "version of the kernels of tpbench that ran: a hash of their code; null: none ran"),
    Column("variant_version", TEXT, "hash of the file of a variant from outside tpbench; null: a variant of tpbench"),
    Column("workload_definition", TEXT, "JSON of a user's workload: title and fields; null: a workload of tpbench"),
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
    Column("memory_gib", REAL, "main memory of the first node"),
    Column("sm_clock_mhz", REAL, "clock of the GPU's multiprocessors while it measured", "MHz"),
    Column("memory_clock_mhz", REAL, "clock of the GPU's memory while it measured", "MHz"),
    Column("throttle_reasons", TEXT, "why a rank's GPU lowered its clocks while it measured, or none; null: unknown"),
    # How the cell ran.
    Column("beside", TEXT, "another-sweep if another sweep had GPUs of this host"),
    Column("interleaved", TEXT, "name of the group of cells that were interleaved with this one"),
    Column("interleaved_cells", INT, "number of cells that were interleaved in one torchrun"),
    Column("not_interleaved", TEXT, "why a cell of an order=interleaved sweep was not interleaved"),
    Column("warm", FLAG, "true if the torchrun had run other jobs before"),
    Column("jobs_before", INT, "jobs that the same processes measured before"),
    Column("command", TEXT, "command line of torchrun"),
    Column("environment", TEXT, "JSON of the environment variables that influence a measurement"),
    Column("job", TEXT, "JSON of the resolved job"),
    Column("trace", TEXT, "Chrome traces of an iteration in the folder of the logs, a file for each rank; null: none"),
    Column("log_dir", TEXT, "folder of the job's logs, relative to the output folder if it is inside"),
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

_UNIT = re.compile(r"(.*), (ms|s|J|KiB|MiB|GiB|GB/s|TFLOP/s)")
"""End of a meaning that names a unit."""
_TYPES = {bool: FLAG, int: INT, float: REAL, str: TEXT}


class RowError(ValueError):
    """A row does not fit the schema. The message names the column."""


@cached_until_registered
def workload_columns() -> dict[str, dict[str, Column]]:
    """Return the columns that each workload adds.

    A field of a problem of this package has the type of its annotation, and its help as meaning. The type of other
    columns, such as results, is known from a value only (`type_of`), and is Arrow's null until then. A unit ends the
    meaning, as in "..., ms", or the name.
    """
    return {name: _columns_of(workload) for name, workload in workloads().items()}


def _columns_of(workload: Workload) -> dict[str, Column]:
    hints = {} if workload.definition else typing.get_type_hints(workload.problem)  # users' fields may differ in type
    columns = {}
    for name, doc in workload.row_columns.items():
        if name not in COMMON_COLUMNS:
            meaning, unit = match.groups() if (match := _UNIT.fullmatch(doc)) else (doc, "")
            kind = type_from_hint(hints[name]) if name in hints else pa.null()
            columns[name] = Column(name, kind, meaning, unit)
    return columns


@cached_until_registered
def all_columns() -> dict[str, Column]:
    """Return every column of a frame of rows: the common ones, then those of each workload."""
    columns: dict[str, Column] = {}
    for added in (COMMON_COLUMNS, *workload_columns().values()):
        columns |= {name: column for name, column in added.items() if name not in columns}
    return columns


def type_from_hint(hint: Any) -> pa.DataType:
    """Return the Arrow type for a field's type hint. A choice between words and numbers is text."""
    kinds = {hint}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = {*typing.get_args(hint)} - {type(None)}
    elif typing.get_origin(hint) is typing.Literal:
        kinds = {type(choice) for choice in typing.get_args(hint)}
    return _TYPES.get(kinds.pop(), TEXT) if len(kinds) == 1 else TEXT


def type_of(value: Any) -> pa.DataType | None:
    """Return the Arrow type for a value, or None if columns have no such type."""
    if isinstance(value, (list, tuple)):
        numbers = all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in value)
        return REALS if numbers else None
    if isinstance(value, datetime.datetime):
        return TIME if value.tzinfo else None
    return next((kind for cls, kind in _TYPES.items() if isinstance(value, cls)), None)
