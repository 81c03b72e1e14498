"""The one-pass entropy loss in Gluon: each logit is read once. `one_pass` launches it and chooses its constants.

A *tile* is R rows by at most C columns. Programs are persistent: each walks down the rows with the same *part* of each,
TILES neighbouring tiles. Asynchronous copies bring tiles to shared memory, two rows ahead. The last tile of a row then
lives in registers: exponentials relative to each thread's own maximum, which one factor a thread turns into the
gradient. The other tiles stay in shared memory until their gradient, whose exponentials are taken again. The reduction
over threads, with its barriers, is once a row.

    a row:  last tile to registers -> state of the row -> publish | the next row's first other tiles: their state
            | await all parts -> gradient of the last tile, then of each other: start to copy into the freed place,
            and where the next row's tile of this number is not reduced yet: its state

A row that fills the shared memory by itself (WHOLE) is not shared by programs that would have to wait for each other:
two of its tiles pass on to registers, and the next row's come into each place as this row's tile leaves it.

Where a row has several parts, on this GPU or on other ranks, each program publishes its state and awaits the others'.
The next row's tiles are worked on meanwhile. All parts of a row are at the same step of programs that
run at the same time (a cooperative launch), so that every wait ends. A wait for a peer that died ends by its limit:
then `failed` is set and what is missing becomes NaN.

**Words.** 8 bytes: the epoch (32 bits, counts launches) and an fp32 number. One store writes both, so that a reader
which sees the epoch has the number: no flags, no fences. A program writes its words into every rank's buffer (over
NVLink for peers) and polls its own. Buffers have two halves, and launches take turns by the epoch's parity: a rank that
is one launch ahead writes to the other half, and it cannot be two ahead, as each launch awaits all ranks. Halves are
half of the buffer, whatever the launch's shape: neighbouring launches of different shapes must not meet either. The
last program advances the epoch, once all have read it, in device memory, so that a replayed CUDA graph does so as well.

**State.** As in `_entropy_kernels`, but in units of log 2 and relative to the *rounded* reference c = max(x) * k, with
k = logits_scale * log2(e) (k_t = k / temperature for targets t), so that each exponent is one multiply-add,
2^(x * k - c), and still exact where the logits have a large common offset:

| word | labels | two-logit losses |
| --- | --- | --- |
| 0 | c | c |
| 1 | s = sum 2^(x k - c) | s |
| 2 | x[label] where it is held, else 0 | c_t |
| 3 | | s_t = sum 2^(t k_t - c_t) |
| 4 | | a = sum of weight * difference in units of log 2 |

Compiled without contraction to multiply-adds but those written here: the loss is the same function of the same words
on all ranks, whatever their shards make the compiler specialise.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
# A kernel's arguments are what Triton makes of them.
# ruff: noqa: RET505, SIM108
# Only a whole if and else leaves the branch not taken uncompiled.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Renamed in triton 3.7 and later.
_copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)
INF = gl.constexpr(float("inf"))
AT_ONCE = gl.constexpr(4096)
"""Rows whose labels or losses a program asks for before it waits for the first."""


@gluon.constexpr_function
def _next_power_of_2(value):
    return 1 << (value - 1).bit_length()


@gluon.constexpr_function
def _tile_layout(rows, vector, row_warps, warps):
    """(ROWS, REPEATS, LANES, VECTOR): a thread holds whole vectors, a warp 32 neighbours of a row."""
    return gl.BlockedLayout([1, 1, 1, vector], [1, 1, 32, 1], [row_warps, 1, warps // row_warps, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def _words_layout(rows, parts, row_warps, warps):
    """(rows, parts): each warp has the words of the rows that it has tiles of, as `_tile_layout` deals rows to warps.
    So states become words, and words what gradients are made of, without a barrier or a look at another warp's."""
    bases = [[0, 1 << bit] for bit in range(parts.bit_length() - 1)]
    lanes = bases[:5] + [[0, 0]] * max(0, 5 - len(bases))
    registers = bases[5:] + [[row_warps << bit, 0] for bit in range((rows // row_warps).bit_length() - 1)]
    by_warp = [[0, 0]] * ((warps // row_warps).bit_length() - 1)
    by_warp += [[1 << bit, 0] for bit in range(row_warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, by_warp, [], [rows, parts])


@gluon.jit
def _exp2(x):
    # Denormal results are zero: what ex2.approx without .ftz spends three more instructions on.
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.constexpr_function
def _wait_for_copies(later):
    return f"cp.async.wait_group {later}; mov.b32 $0, 0;"


@gluon.jit
def _await_copies(LATER: gl.constexpr):
    """Wait for this thread's copies, but for the last LATER groups. `async_copy.wait_group` has a barrier besides,
    which nothing here needs: a thread reads from shared memory only what it copied there itself."""
    gl.inline_asm_elementwise(_wait_for_copies(LATER), "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _reference(c):
    """What exponents are relative to: 0 for the maximum of nothing, whose -inf - (-inf) would be NaN."""
    return gl.where(c == -INF, 0.0, c)


@gluon.jit
def _weighted(weight, difference):
    return gl.where(weight == 0.0, 0.0, weight * difference)


@gluon.jit
def _shifted(a, s, s_t, weight, weight_t, shift, shift_t, LOSS: gl.constexpr):
    """A part's sum of weighted differences, relative to new references; see the table in `_entropy_kernels`."""
    if LOSS == "soft_cross_entropy":
        return _weighted(weight_t, a + s_t * shift)
    if LOSS == "forward_kl":
        return _weighted(weight_t, a + s_t * (shift_t - shift))
    return _weighted(weight, a + s * (shift - shift_t))


@gluon.jit
def _plus(a_1, b_1, c_1, a_2, b_2, c_2):
    return a_1 + a_2, b_1 + b_2, c_1 + c_2


@gluon.jit
def _maxima(a_1, b_1, a_2, b_2):
    return gl.maximum(a_1, a_2), gl.maximum(b_1, b_2)


@gluon.jit
def _merge(c, s, b, st, a, AXIS: gl.constexpr, LOSS: gl.constexpr):
    """Merge the states along an axis, in one order: the same on all ranks."""
    if LOSS == "cross_entropy":
        c_row = gl.max(c, axis=AXIS)
        s_row = gl.sum(s * _exp2(c - gl.expand_dims(_reference(c_row), AXIS)), axis=AXIS)
        return c_row, s_row, gl.sum(b, axis=AXIS), s_row, s_row
    else:
        c_row, b_row = gl.reduce((c, b), AXIS, _maxima)
        reference = gl.expand_dims(_reference(c_row), AXIS)
        reference_t = gl.expand_dims(_reference(b_row), AXIS)
        weight = _exp2(c - reference)
        weight_t = _exp2(b - reference_t)
        a = _shifted(a, s, st, weight, weight_t, _reference(c) - reference, _reference(b) - reference_t, LOSS)
        s_row, st_row, a_row = gl.reduce((s * weight, st * weight_t, a), AXIS, _plus)
        return c_row, s_row, b_row, st_row, a_row


@gluon.constexpr_function
def _states_layout(rows, row_warps, warps, crossed):
    """(rows, warps of a row): each warp has its own state or, crossed, as (rows, warps of a row, 2, 2, 2) numbers,
    those of all warps that have the row, a lane each."""
    numbers = 3 if crossed else 0
    of_row = (warps // row_warps).bit_length() - 1
    nothing = [0] * (2 + numbers)

    def base(axis, value):
        return [*nothing[:axis], value, *nothing[axis + 1 :]]

    columns = [base(1, 1 << bit) for bit in range(of_row)]
    registers = [base(2 + axis, 1) for axis in range(numbers)]
    registers += [base(0, row_warps << bit) for bit in range((rows // row_warps).bit_length() - 1)]
    lanes = (columns if crossed else [nothing] * of_row) + [nothing] * (5 - of_row)
    by_warp = [nothing] * of_row if crossed else columns
    by_warp += [base(0, 1 << bit) for bit in range(row_warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, by_warp, [], [rows, warps // row_warps] + [2] * numbers)


@gluon.jit
def _merge_threads(c, s, b, st, a, ROW_WARPS: gl.constexpr, LOSS: gl.constexpr):
    """Merge the two-logit states of a row's threads, (ROWS, LANES) to (ROWS,): within each warp, then across. All
    numbers cross at once, so that warps wait for each other once, where maxima and sums of their own would make them do
    so four times."""
    ROWS: gl.constexpr = c.type.shape[0]
    WARPS: gl.constexpr = c.type.shape[1] // 32
    num_warps: gl.constexpr = gl.num_warps()
    by_warp: gl.constexpr = [ROWS, WARPS, 32]
    c, s, b, st, a = _merge(c.reshape(by_warp), s.reshape(by_warp), b.reshape(by_warp), st.reshape(by_warp),
                            a.reshape(by_warp), 2, LOSS)  # fmt: skip
    if WARPS > 1:
        own: gl.constexpr = _states_layout(ROWS, ROW_WARPS, num_warps, False)  # as they are, by its name
        c = gl.convert_layout(c, own, assert_trivial=True)
        s = gl.convert_layout(s, own, assert_trivial=True)
        b = gl.convert_layout(b, own, assert_trivial=True)
        st = gl.convert_layout(st, own, assert_trivial=True)
        a = gl.convert_layout(a, own, assert_trivial=True)
        maxima_and_sums = gl.join(gl.join(c, b), gl.join(s, st))
        numbers = gl.join(maxima_and_sums, gl.join(gl.join(a, a), gl.join(a, a)))
        numbers = gl.convert_layout(numbers, _states_layout(ROWS, ROW_WARPS, num_warps, True))
        maxima_and_sums, differences = gl.split(numbers)
        maxima, sums = gl.split(maxima_and_sums)
        c, b = gl.split(maxima)
        s, st = gl.split(sums)
        a, _ = gl.split(gl.split(differences)[0])
    return _merge(c, s, b, st, a, 1, LOSS)


@gluon.constexpr_function
def _add_products(many):
    """The sum of so many products, in each output. One whose weight is zero is left out, were it of infinity."""
    outputs, weights, values = (range(first, first + many) for first in (0, many, 2 * many))
    return (
        "{.reg .pred counts; .reg .f32 total; mov.f32 total, 0f00000000;"
        + "".join(
            f"setp.neu.f32 counts, ${weight}, 0f00000000; @counts fma.rn.f32 total, ${weight}, ${value}, total;"
            for weight, value in zip(weights, values, strict=True)
        )
        + "".join(f"mov.f32 ${output}, total;" for output in outputs)
        + "}"
    )


@gluon.constexpr_function
def _constraints(output, outputs, input, inputs):
    return ",".join([output] * outputs + [input] * inputs)


@gluon.jit
def _any(a, b):
    return a


@gluon.jit
def _weighted_in_thread(weight, difference):
    """The sum of `_weighted`, (ROWS, REPEATS, LANES, VECTOR) to (ROWS, LANES), within each thread: a comparison and a
    multiply-add an element, where a product, a choice and a sum would be four instructions."""
    many: gl.constexpr = weight.type.shape[3]
    by_vector = gl.inline_asm_elementwise(
        _add_products(many),
        _constraints("=f", many, "f", 2 * many),
        [weight, difference],
        dtype=gl.float32,
        is_pure=True,
        pack=many,
    )
    return gl.sum(gl.reduce(by_vector, 3, _any), axis=1)


@gluon.jit
def _times(weight, difference):
    """`_weighted` in two instructions."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred counts;
        setp.neu.f32 counts, $1, 0f00000000;
        mov.f32 $0, $1;
        @counts mul.f32 $0, $1, $2;
        }""",
        "=&f,f,f",
        [weight, difference],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def _maximum(many):
    """Of so many bf16 numbers, in fp32 in each output: two at a time, while they are in pairs."""
    pairs = range(many + 1, many + many // 2)
    return (
        f"{{.reg .b32 pair, low; .reg .f32 other, most; mov.b32 pair, ${many};"
        + "".join(f"max.bf16x2 pair, pair, ${each};" for each in pairs)
        + "shl.b32 low, pair, 16; and.b32 pair, pair, 0xffff0000; mov.b32 other, low; mov.b32 most, pair;"
        + "max.f32 most, most, other;"
        + "".join(f"mov.f32 ${output}, most;" for output in range(many))
        + "}"
    )


@gluon.jit
def _max_in_thread(values, FEW: gl.constexpr):
    """(ROWS, REPEATS, LANES, VECTOR) to (ROWS, LANES), within each thread, in fp32."""
    if FEW and values.dtype == gl.bfloat16 and values.type.shape[3] > 1:
        many: gl.constexpr = values.type.shape[1] * values.type.shape[3]
        values = gl.inline_asm_elementwise(
            _maximum(many),
            _constraints("=f", many, "r", many // 2),
            [values],
            dtype=gl.float32,
            is_pure=True,
            pack=many,
        )
        return gl.reduce(gl.reduce(values, 3, _any), 1, _any)
    else:
        values = values.to(gl.float32)
        return gl.max(gl.max(values, axis=3), axis=1)


@gluon.jit
def _sum_in_thread(values):
    """(ROWS, REPEATS, LANES, VECTOR) to (ROWS, LANES), within each thread."""
    return gl.sum(gl.sum(values, axis=3), axis=1)


@gluon.jit
def _row_to_tile(values, tile: gl.constexpr):
    """(ROWS,) to (ROWS, 1, 1, 1) in the tile's layout."""
    row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, tile)))
    return gl.convert_layout(values, row)[:, None, None, None]


@gluon.jit
def _row_to_thread(values, by_thread: gl.constexpr):
    """(ROWS,) to (ROWS, 1) in the layout of what each thread has of a row."""
    return gl.convert_layout(values, gl.SliceLayout(1, by_thread))[:, None]


@gluon.jit
def _thread_state(x, t, k, k_t, LOSS: gl.constexpr, FEW: gl.constexpr):
    """The state of each thread's part of a tile of raw logits, (ROWS, LANES) in fp32, but for x[label]; and what the
    gradient is made of, relative to the thread's own maxima: (ROWS, REPEATS, LANES, VECTOR) of 2^(x k - c) and, for
    two-logit losses, of 2^(t k_t - c_t) or, for reverse_kl, (x k - c) - (t k_t - c_t).
    """
    c = _max_in_thread(x, FEW) * k
    x = gl.fma(_in_fp32(x, FEW), k, 0.0 - _reference(c)[:, None, :, None])
    exp_x = _exp2(x)
    s = _sum_in_thread(exp_x)
    if LOSS == "cross_entropy":
        return c, s, c, s, s, exp_x, exp_x
    else:
        ct = _max_in_thread(t, FEW) * k_t
        t = gl.fma(_in_fp32(t, FEW), k_t, 0.0 - _reference(ct)[:, None, :, None])
        exp_t = _exp2(t)
        st = _sum_in_thread(exp_t)
        kept = exp_t
        if LOSS == "soft_cross_entropy":
            a = _weighted_in_thread(exp_t, x)
        elif LOSS == "forward_kl":
            a = _weighted_in_thread(exp_t, t - x)
        else:
            kept = x - t
            a = _weighted_in_thread(exp_x, kept)
        return c, s, ct, st, a, exp_x, kept


@gluon.jit
def _add(c_1, s_1, ct_1, st_1, a_1, c_2, s_2, ct_2, st_2, a_2, LOSS: gl.constexpr):
    """Merge two states, element by element."""
    c = gl.maximum(c_1, c_2)
    r = _reference(c)
    w_1 = _exp2(c_1 - r)
    w_2 = _exp2(c_2 - r)
    s = s_1 * w_1 + s_2 * w_2
    if LOSS == "cross_entropy":
        return c, s, c, s, s
    else:
        ct = gl.maximum(ct_1, ct_2)
        rt = _reference(ct)
        wt_1 = _exp2(ct_1 - rt)
        wt_2 = _exp2(ct_2 - rt)
        a_1 = _shifted(a_1, s_1, st_1, w_1, wt_1, _reference(c_1) - r, _reference(ct_1) - rt, LOSS)
        a_2 = _shifted(a_2, s_2, st_2, w_2, wt_2, _reference(c_2) - r, _reference(ct_2) - rt, LOSS)
        return c, s, ct, st_1 * wt_1 + st_2 * wt_2, a_1 + a_2


@gluon.jit
def _word(value, epoch):
    return (epoch.to(gl.int64) << 32) | (value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF)


@gluon.jit
def _load_labels(labels, row, n_rows):
    return gl.load(labels + row, mask=row < n_rows, other=-1)


@gluon.jit
def _columns_of(label, vocab_size, ignore_index):
    """Labels as columns, int32, -1 where a row does not count."""
    counts = (label != ignore_index) & (label >= 0) & (label < vocab_size)
    return gl.where(counts, label.to(gl.int32), -1)


@gluon.jit
def _counts(row, label, n_rows, vocab_size, ignore_index, LABELS: gl.constexpr):
    """Which rows are worked on: those that exist and whose labels count. Rows past the last have the label -1."""
    if LABELS:
        return _columns_of(label, vocab_size, ignore_index) >= 0
    else:
        return row < n_rows


@gluon.jit
def _tile_indices(tile: gl.constexpr, REPEATS: gl.constexpr, LANES: gl.constexpr, VECTOR: gl.constexpr):
    """Of each element of a tile: its vector, (1, REPEATS, LANES, 1), and its place in it, (1, 1, 1, VECTOR)."""
    repeat = gl.arange(0, REPEATS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, tile))))
    lane = gl.arange(0, LANES, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, tile))))
    place = gl.arange(0, VECTOR, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, tile))))
    vector = repeat[None, :, None, None] * LANES + lane[None, None, :, None]
    return vector, place[None, None, None, :]


@gluon.jit
def _places(pointer, row, first, row_stride, column_stride, vector, place, tile: gl.constexpr, VECTOR: gl.constexpr,
            ALIGNED: gl.constexpr):  # fmt: skip
    """Addresses of a tile's elements. ALIGNED: strides and the first column are in vectors, so that every vector's
    address is known to be a multiple of its size; else in elements."""
    if ALIGNED:
        return pointer + (_row_to_tile(row, tile) * row_stride + first) * VECTOR + (vector * VECTOR + place)
    else:
        column = first + (vector * VECTOR + place).to(gl.int64)
        return pointer + _row_to_tile(row, tile) * row_stride + column * column_stride


@gluon.jit
def _inside(rows, vector, place, extent, tile: gl.constexpr, VECTOR: gl.constexpr, FULL: gl.constexpr):
    """Which elements exist: of these rows all, if FULL, else the first `extent` vectors."""
    rows = _row_to_tile(rows, tile)
    if FULL:
        return rows & (vector >= 0) & (place >= 0)
    else:
        return rows & (vector < extent) & (place >= 0)


@gluon.jit
def _copy(shared_x, shared_t, at, logits, target, row, counts, first, tile_columns, extent, tile_of_row, logits_row,
          logits_column, target_row, target_column, vector, place, tile: gl.constexpr, VECTOR: gl.constexpr,
          LABELS: gl.constexpr, FULL: gl.constexpr, ALIGNED: gl.constexpr):  # fmt: skip
    """Start to copy a tile of the rows that count to place `at`; the rest of it becomes zero. One group of copies."""
    begin = first + tile_of_row * tile_columns
    inside = _inside(counts, vector, place, gl.minimum(extent - tile_of_row * tile_columns, tile_columns), tile, VECTOR,
                     FULL)  # fmt: skip
    pointer = _places(logits, row, begin, logits_row, logits_column, vector, place, tile, VECTOR, ALIGNED)
    _copy_one(shared_x.index(at), pointer, inside, ALIGNED)
    if not LABELS:
        pointer = _places(target, row, begin, target_row, target_column, vector, place, tile, VECTOR, ALIGNED)
        _copy_one(shared_t.index(at), pointer, inside, ALIGNED)
    async_copy.commit_group()


@gluon.jit
def _copy_one(shared, pointer, inside, ALIGNED: gl.constexpr):
    if ALIGNED:
        _copy_to_shared(shared, pointer, mask=inside)
    else:
        shared.store(gl.load(pointer, mask=inside, other=0.0))


@gluon.jit
def _in_fp32(values, FEW: gl.constexpr):
    """In fp32; bf16 in pairs, an instruction a number: the compiler takes three for two."""
    if FEW and values.dtype == gl.bfloat16 and values.type.shape[3] > 1:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [values], dtype=gl.float32, is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        return values.to(gl.float32)


@gluon.jit
def _load_one(shared, vector, place, valid, tile: gl.constexpr, VECTOR: gl.constexpr, MASKED: gl.constexpr):
    values = shared.load(tile)
    if MASKED:
        values = values.to(gl.float32)
        values = gl.where((vector * VECTOR + place) + gl.zeros_like(values).to(gl.int32) < valid, values, -INF)
    return values


@gluon.jit
def _load(shared_x, shared_t, at, valid, tile_of_row, tile_columns, vector, place, tile: gl.constexpr,
          VECTOR: gl.constexpr, LABELS: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """The tiles of logits and targets at place `at`. MASKED: in fp32, -inf past the tile's columns and from column
    `valid` of the part on; else as they are."""
    valid = gl.minimum(valid - tile_of_row * tile_columns, tile_columns)
    x = _load_one(shared_x.index(at), vector, place, valid, tile, VECTOR, MASKED)
    if LABELS:
        return x, x
    else:
        return x, _load_one(shared_t.index(at), vector, place, valid, tile, VECTOR, MASKED)


@gluon.jit
def _held_state(c, s, ct, st, a, shared_x, shared_t, at, BEGIN: gl.constexpr, END: gl.constexpr, LATER: gl.constexpr,
                valid, tile_columns, k, k_t, vector, place, tile: gl.constexpr, VECTOR: gl.constexpr,
                LOSS: gl.constexpr, MASKED: gl.constexpr, FEW: gl.constexpr):  # fmt: skip
    """Add to a state by thread tiles BEGIN to END of a row, which stay in shared memory, each at its place `at`. LATER:
    how many groups of copies were started after the last of these tiles."""
    for tile_of_row in gl.static_range(BEGIN, END):
        _await_copies(END - 1 - tile_of_row + LATER)
        x, t = _load(shared_x[tile_of_row], shared_t[tile_of_row], at, valid, tile_of_row, tile_columns, vector, place,
                     tile, VECTOR, LOSS == "cross_entropy", MASKED)  # fmt: skip
        c_2, s_2, ct_2, st_2, a_2, _exp, _kept = _thread_state(x, t, k, k_t, LOSS, FEW)
        c, s, ct, st, a = _add(c, s, ct, st, a, c_2, s_2, ct_2, st_2, a_2, LOSS)
    return c, s, ct, st, a


@gluon.jit
def _always(HIDDEN: gl.constexpr = True):
    """True, which no compiler knows if HIDDEN: it moves nothing across the branch, where it would put off copies and
    stores until it has computed all that is for the registers to hold."""
    if HIDDEN:
        one = gl.inline_asm_elementwise("mov.u32 $0, %nctaid.y;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        return one > 0
    else:
        return gl.to_tensor(1) > 0


@gluon.jit
def _write(grad, g, row, exists, first, tile_columns, extent, valid, tile_of_row, grad_row, grad_column, vector, place,
           tile: gl.constexpr, VECTOR: gl.constexpr, FULL: gl.constexpr, MASKED: gl.constexpr,
           ALIGNED: gl.constexpr):  # fmt: skip
    """Store a tile's gradient."""
    if MASKED:
        unit: gl.constexpr = VECTOR if ALIGNED else 1
        inside = (vector * VECTOR + place) + gl.zeros_like(g).to(gl.int32) < valid - tile_of_row * tile_columns * unit
        g = gl.where(inside, g, 0.0)
    extent = gl.minimum(extent - tile_of_row * tile_columns, tile_columns)
    inside = _inside(exists, vector, place, extent, tile, VECTOR, FULL)
    begin = first + tile_of_row * tile_columns
    to = _places(grad, row, begin, grad_row, grad_column, vector, place, tile, VECTOR, ALIGNED)
    gl.store(to, g.to(grad.dtype.element_ty), mask=inside)


@gluon.jit
def _write_kept(grad, exp_x, kept, c, ct, reference, reference_t, factor, second, row, exists, first, tile_columns,
                extent, valid, tile_of_row, grad_row, grad_column, vector, place, tile: gl.constexpr,
                VECTOR: gl.constexpr, LOSS: gl.constexpr, FULL: gl.constexpr, MASKED: gl.constexpr,
                ALIGNED: gl.constexpr):  # fmt: skip
    """Store the gradient of a tile whose exponentials are in registers, relative to the thread's maxima c and ct.
    second, (ROWS, LANES): of reverse_kl the mean difference, of the other two-logit losses the factor of targets."""
    g = exp_x * (_exp2(c - reference) * factor)[:, None, :, None]
    if LOSS == "reverse_kl":
        shift = (_reference(c) - reference) - (_reference(ct) - reference_t) - second
        g = _times(g, kept + shift[:, None, :, None])
    elif LOSS != "cross_entropy":
        g = gl.fma(kept, (_exp2(ct - reference_t) * second)[:, None, :, None], g)
    _write(grad, g, row, exists, first, tile_columns, extent, valid, tile_of_row, grad_row, grad_column, vector, place,
           tile, VECTOR, FULL, MASKED, ALIGNED)  # fmt: skip


@gluon.jit
def _write_held(grad, x, t, k, k_t, reference, reference_t, factor, second, row, exists, first, tile_columns, extent,
                valid, tile_of_row, grad_row, grad_column, vector, place, tile: gl.constexpr, VECTOR: gl.constexpr,
                LOSS: gl.constexpr, FULL: gl.constexpr, MASKED: gl.constexpr, ALIGNED: gl.constexpr,
                FEW: gl.constexpr):  # fmt: skip
    """Store the gradient of a tile of raw logits; second as in `_write_kept`."""
    x = gl.fma(_in_fp32(x, FEW), k, 0.0 - reference[:, None, :, None])
    g = _exp2(x)
    if LOSS == "cross_entropy":
        g *= factor[:, None, :, None]
    else:
        t = gl.fma(_in_fp32(t, FEW), k_t, 0.0 - reference_t[:, None, :, None])
        if LOSS == "reverse_kl":
            # The mean joins as a term: subtracted from a large reference it would leave that one's last bits.
            offset = 0.0 - factor * second
            g = _times(g, gl.fma(x - t, factor[:, None, :, None], offset[:, None, :, None]))
        else:
            g = gl.fma(_exp2(t), second[:, None, :, None], g * factor[:, None, :, None])
    _write(grad, g, row, exists, first, tile_columns, extent, valid, tile_of_row, grad_row, grad_column, vector, place,
           tile, VECTOR, FULL, MASKED, ALIGNED)  # fmt: skip


# The exchange's bookkeeping, which the tests also run on plain numbers: a model of ranks that overtake each other.
@gluon.jit
def _word_at(epoch, half, row, queue, QUEUES: gl.constexpr):
    """Where in a rank's words a row's first one stands that is of queue = rank * SLOTS + slot of the part."""
    return (epoch & 1) * half + row * QUEUES + queue


@gluon.jit
def _pitch(capacity, QUEUES: gl.constexpr):
    """How far apart a row's words are: each kind of number has its own place for every row."""
    return capacity * QUEUES


@gluon.jit
def _fills(part, slot, n_parts):
    """Whether a part's program writes a slot: its own, and of those that no part has its share, with nothing in them,
    so that readers need not know how many parts a peer has."""
    return slot % n_parts == part


@gluon.constexpr_function
def _store_word(row_warps, warps):
    """By the first of the warps that share a row."""
    return f"""{{
        .reg .pred p;
        .reg .b32 t;
        mov.u32 t, %tid.x;
        and.b32 t, t, {32 * (warps // row_warps) - 32};
        setp.eq.u32 p, t, 0;
        setp.ne.and.b32 p, $3, 0, p;
        @p st.relaxed.sys.global.b64 [$1], $2;
        mov.b32 $0, 0;
        }}"""


@gluon.jit
def _publish(value, nothing, kind: gl.constexpr, buffers, line, pitch, sent, empty, epoch, ROW_WARPS: gl.constexpr):
    """Store one kind of number, (ROWS,), to all ranks' buffers, (ROWS, RANKS * SLOTS)."""
    num_warps: gl.constexpr = gl.num_warps()
    word = _word(gl.where(empty, nothing, value[:, None]), epoch)
    gl.inline_asm_elementwise(
        _store_word(ROW_WARPS, num_warps),
        "=r,l,l,r",
        [buffers + (line + kind * pitch) * 8, word, sent],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _look(inbox, pitch, needed, WIDTH: gl.constexpr):
    """The words as they are now, (ROWS, RANKS * SLOTS) each."""
    w_0 = gl.load(inbox, mask=needed, other=0, volatile=True)
    w_1 = gl.load(inbox + pitch, mask=needed, other=0, volatile=True)
    w_2 = gl.load(inbox + 2 * pitch, mask=needed, other=0, volatile=True)
    if WIDTH == 3:
        return w_0, w_1, w_2, w_2, w_2
    else:
        w_3 = gl.load(inbox + 3 * pitch, mask=needed, other=0, volatile=True)
        w_4 = gl.load(inbox + 4 * pitch, mask=needed, other=0, volatile=True)
        return w_0, w_1, w_2, w_3, w_4


@gluon.constexpr_function
def _await_word(width):
    """Of one place: look at its words again until all have come, or the limit has passed, which is zero from then on.
    A thread waits for its own places alone; what follows in the warp waits for all its threads."""
    words = range(width)
    wanted, limit, pointer, pitch = 2 * width + 1, 2 * width + 2, 2 * width + 3, 2 * width + 4
    epoch, failed = 2 * width + 5, 2 * width + 6
    differ = "setp.eq.b32 late, 1, 0;" + "".join(
        f"mov.b64 {{number, stamp}}, ${each}; setp.ne.or.b32 late, stamp, ${epoch}, late;" for each in words
    )
    differ += f"setp.ne.and.b32 late, ${wanted}, 0, late;"
    return (
        "{.reg .pred late, over; .reg .b32 number, stamp; .reg .b64 began, now, place;"
        + "".join(f"mov.b64 ${each}, ${width + 1 + each};" for each in words)
        + f"mov.b64 ${width}, ${limit}; {differ} @!late bra THERE; mov.u64 began, %globaltimer;"
        + f"AGAIN: mov.b64 place, ${pointer};"
        + "".join(f"ld.relaxed.sys.global.b64 ${each}, [place]; add.s64 place, place, ${pitch};" for each in words)
        + f"{differ} @!late bra THERE; mov.u64 now, %globaltimer; sub.s64 now, now, began;"
        + f"setp.gt.s64 over, now, ${width}; @!over bra AGAIN; mov.b64 ${width}, 0;"
        + f"mov.b32 number, 1; st.global.b32 [${failed}], number; THERE: }}"
    )


@gluon.jit
def _await(w_0, w_1, w_2, w_3, w_4, inbox, pitch, needed, epoch, limits, failed, WIDTH: gl.constexpr):
    """The words, (ROWS, RANKS * SLOTS) each, and how long to wait for later ones."""
    like = gl.zeros_like(w_0)
    needed = gl.where(needed, 1, 0)
    inbox = inbox.to(gl.int64)
    pitch = like + pitch * 8
    epoch = like.to(gl.int32) + epoch
    failed = like + failed.to(gl.int64)
    if WIDTH == 3:
        w_0, w_1, w_2, limits = gl.inline_asm_elementwise(
            _await_word(WIDTH), "=&l,=&l,=&l,=&l,l,l,l,r,l,l,l,r,l",
            [w_0, w_1, w_2, needed, limits, inbox, pitch, epoch, failed],
            dtype=(gl.int64, gl.int64, gl.int64, gl.int64), is_pure=False, pack=1,
        )  # fmt: skip
        return w_0, w_1, w_2, w_2, w_2, limits
    else:
        w_0, w_1, w_2, w_3, w_4, limits = gl.inline_asm_elementwise(
            _await_word(WIDTH), "=&l,=&l,=&l,=&l,=&l,=&l,l,l,l,l,l,r,l,l,l,r,l",
            [w_0, w_1, w_2, w_3, w_4, needed, limits, inbox, pitch, epoch, failed],
            dtype=(gl.int64, gl.int64, gl.int64, gl.int64, gl.int64, gl.int64), is_pure=False, pack=1,
        )  # fmt: skip
        return w_0, w_1, w_2, w_3, w_4, limits


@gluon.jit
def _value(word, epoch, needed, nothing):
    """A word's number; NaN where it never came, `nothing` from the ranks that only fill up a power of two."""
    number = word.to(gl.int32).to(gl.float32, bitcast=True)
    number = gl.where((word >> 32).to(gl.int32) == epoch, number, float("nan"))
    return gl.where(needed, number, nothing)


@gluon.jit
def _arrive(counter):
    """Add one, after what all threads of the program have stored before a barrier: nobody waits for the sum."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 t;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        @p red.release.gpu.global.add.u32 [$1], 1;
        mov.b32 $0, 0;
        }""",
        "=r,l,~{memory}",
        [counter.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _await_arrivals(counter, many):
    gl.inline_asm_elementwise(
        "{.reg .pred p; AGAIN: ld.acquire.gpu.global.u32 $0, [$1]; setp.lt.u32 p, $0, $2; @p bra AGAIN;}",
        "=&r,l,r,~{memory}",
        [counter.to(gl.int64), many],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _row_loss(c, s, b, st, a, k, z_loss, LOSS: gl.constexpr, Z_LOSS: gl.constexpr):
    """A row's loss and log2 of its sum of exp, from the state of the whole vocabulary."""
    log_s = gl.log2(s)
    reference = _reference(c)
    log_z = reference + log_s
    if LOSS == "cross_entropy":
        loss = log_s - gl.fma(b, k, 0.0 - reference)
    elif LOSS == "soft_cross_entropy":
        loss = log_s - a / st
    elif LOSS == "forward_kl":
        loss = a / st - gl.log2(st) + log_s
    else:
        loss = a / s - log_s + gl.log2(st)
    loss *= LN_2
    if Z_LOSS:
        loss += z_loss * (log_z * LN_2) * (log_z * LN_2)
    return loss, log_z


@gluon.jit(
    do_not_specialize=[
        "n_rows", "n_columns", "part_columns", "n_valid", "vocab_start", "vocab_size", "ignore_index", "rank",
        "capacity", "half", "limit_ns",
    ]
)  # fmt: skip
def one_pass_kernel(
    logits, target, grad, row_loss, loss, words, peers, control, failed, n_rows, n_columns, n_parts, part_columns,
    n_valid, vocab_start, vocab_size, ignore_index, logits_row, logits_column, target_row, target_column, grad_row,
    grad_column, k, k_t, z_loss, grad_scale, loss_scale, rank, capacity, half, limit_ns,
    LOSS: gl.constexpr, GRAD: gl.constexpr, REDUCE: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr,
    REPEATS: gl.constexpr, LANES: gl.constexpr, VECTOR: gl.constexpr, ROW_WARPS: gl.constexpr, TILES: gl.constexpr,
    WORLD: gl.constexpr, SLOTS: gl.constexpr, Z_LOSS: gl.constexpr, FULL: gl.constexpr,
    MASKED: gl.constexpr, ALIGNED: gl.constexpr, AHEAD: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """See the module. Sizes are in columns, strides (and part_columns) in vectors if ALIGNED.

    words: int64 (2, half), this rank's, in each half (WIDTH, capacity, RANKS * SLOTS) and what is left over; peers:
    int64 (WORLD,) addresses of all ranks'.
    control: int32 (2,) epoch and programs done. failed: int32 (1,), may be the host's. loss_scale: on the sum of row
    losses, and with COUNT divided by the rows that count, as is grad_scale.
    """
    LABELS: gl.constexpr = LOSS == "cross_entropy"
    WIDTH: gl.constexpr = 3 if LABELS else 5
    EXCHANGE: gl.constexpr = SLOTS > 0
    num_warps: gl.constexpr = gl.num_warps()
    tile: gl.constexpr = _tile_layout(ROWS, VECTOR, ROW_WARPS, num_warps)
    row_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, tile)))
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    element: gl.constexpr = logits.dtype.element_ty
    # A row that fills the shared memory has one place of each tile, to which the next row's comes when this row's is
    # done with. Two tiles pass on to registers, by the same place, a tile's state is taken LAG tiles behind its copy,
    # and READ tiles whose gradients are next are read together: their places are free at once, after one barrier.
    PLACES: gl.constexpr = 1 if WHOLE else 2
    KEPT: gl.constexpr = 2 if WHOLE else 1
    LAG: gl.constexpr = 2 if WHOLE else 0
    READ: gl.constexpr = 2 if WHOLE else 1
    HELD: gl.constexpr = TILES - KEPT
    LAST: gl.constexpr = TILES - 1
    gl.static_assert(not WHOLE or not EXCHANGE)
    # Where instructions are what is short, rather than memory's bandwidth or its latency: fewer of them, but in an
    # order that the compiler may not change.
    FEW: gl.constexpr = WHOLE or not LABELS
    FIRST_LOOK: gl.constexpr = AHEAD - 1 if AHEAD > 0 else 0
    # The places of each tile that stays here, then that of those that pass on to registers. Each tile has memory of
    # its own: in one piece the compiler would see all copies and reads meet, and put barriers between.
    places: gl.constexpr = [PLACES, ROWS, REPEATS, LANES, VECTOR]
    place_of_kept: gl.constexpr = [1, ROWS, REPEATS, LANES, VECTOR]
    shared_x = ()
    for _ in gl.static_range(HELD):
        shared_x = shared_x + (gl.allocate_shared_memory(element, places, flat),)  # type: ignore[assignment]  # noqa: RUF005
    shared_x = shared_x + (gl.allocate_shared_memory(element, place_of_kept, flat),)  # type: ignore[assignment]  # noqa: RUF005
    shared_t = shared_x
    if not LABELS:
        shared_t = ()
        for _ in gl.static_range(HELD):
            shared_t = shared_t + (gl.allocate_shared_memory(element, places, flat),)  # type: ignore[assignment]  # noqa: RUF005
        shared_t = shared_t + (gl.allocate_shared_memory(element, place_of_kept, flat),)  # type: ignore[assignment]  # noqa: RUF005

    part = gl.program_id(0) % n_parts
    walker = gl.program_id(0) // n_parts
    walkers = gl.num_programs(0) // n_parts
    steps = gl.cdiv(gl.cdiv(n_rows, ROWS) - walker, walkers)  # tiles of this program
    unit: gl.constexpr = VECTOR if ALIGNED else 1
    first = part * part_columns
    width = gl.minimum(n_columns - first * unit, part_columns * unit)
    valid = gl.minimum(n_valid - first * unit, width)
    if ALIGNED:
        extent = width // VECTOR
    else:
        extent = width
    tile_columns = part_columns // TILES
    start = vocab_start + first * unit
    vector, place = _tile_indices(tile, REPEATS, LANES, VECTOR)
    row_in_tile = gl.arange(0, ROWS, row_layout)
    epoch = 0
    if EXCHANGE:
        epoch = gl.load(control) + 1

    # The first tiles are under way before anything else is looked at.
    row = (walker * ROWS + row_in_tile).to(gl.int64)
    first_label = row_in_tile
    next_label = row_in_tile
    if LABELS:
        first_label = _load_labels(target, row, n_rows)
        next_label = _load_labels(target, row + walkers * ROWS, n_rows)
    counts = _counts(row, first_label, n_rows, vocab_size, ignore_index, LABELS)
    if WHOLE:
        _copy(shared_x[HELD], shared_t[HELD], 0, logits, target, row, counts, first, tile_columns, extent, HELD,
              logits_row, logits_column, target_row, target_column, vector, place, tile, VECTOR, LABELS, FULL,
              ALIGNED)  # fmt: skip
    for tile_of_row in gl.static_range(HELD):
        if WHOLE and tile_of_row == HELD - LAG:
            _await_copies(HELD - LAG)
            x_0, t_0 = _load(shared_x[HELD], shared_t[HELD], 0, valid, HELD, tile_columns * unit, vector, place, tile,
                             VECTOR, LABELS, MASKED)  # fmt: skip
            _copy(shared_x[HELD], shared_t[HELD], 0, logits, target, row, counts, first, tile_columns, extent, LAST,
                  logits_row, logits_column, target_row, target_column, vector, place, tile, VECTOR, LABELS, FULL,
                  ALIGNED)  # fmt: skip
            c_0, s_0, ct_0, st_0, a_0, exp_0, kept_0 = _thread_state(x_0, t_0, k, k_t, LOSS, FEW)
        _copy(shared_x[tile_of_row], shared_t[tile_of_row], 0, logits, target, row, counts, first, tile_columns, extent,
              tile_of_row, logits_row, logits_column, target_row, target_column, vector, place, tile, VECTOR, LABELS,
              FULL, ALIGNED)  # fmt: skip
    next_row = row + walkers * ROWS
    if not WHOLE:
        _copy(shared_x[HELD], shared_t[HELD], 0, logits, target, row, counts, first, tile_columns, extent, LAST,
              logits_row, logits_column, target_row, target_column, vector, place, tile, VECTOR, LABELS, FULL,
              ALIGNED)  # fmt: skip
        counts = _counts(next_row, next_label, n_rows, vocab_size, ignore_index, LABELS)
        for tile_of_row in gl.static_range(HELD):
            _copy(shared_x[tile_of_row], shared_t[tile_of_row], 1, logits, target, next_row, counts, first,
                  tile_columns, extent, tile_of_row, logits_row, logits_column, target_row, target_column, vector,
                  place, tile, VECTOR, LABELS, FULL, ALIGNED)  # fmt: skip

    inverse_count = 1.0
    if COUNT:
        many: gl.constexpr = gl.BlockedLayout([4], [32], [num_warps], [0])
        total = gl.zeros([AT_ONCE], gl.int32, many)
        for begin in range(0, n_rows, AT_ONCE):
            each = begin + gl.arange(0, AT_ONCE, many)
            label = _columns_of(_load_labels(target, each, n_rows), vocab_size, ignore_index)
            total += gl.where((label >= 0) & (each < n_rows), 1, 0)
        inverse_count = 1.0 / gl.maximum(gl.sum(total, axis=0), 1).to(gl.float32)
    scale = grad_scale * inverse_count

    # Labels of this row and of the next two, whose copies start next: each is asked for a step before its first use.
    this_label = first_label
    later_label = row_in_tile
    if LABELS:
        later_label = _load_labels(target, next_row + walkers * ROWS, n_rows)

    RANKS: gl.constexpr = _next_power_of_2(WORLD)
    QUEUES: gl.constexpr = RANKS * SLOTS if EXCHANGE else 1
    words_layout: gl.constexpr = _words_layout(ROWS, QUEUES, ROW_WARPS, num_warps)
    by_row: gl.constexpr = gl.SliceLayout(1, words_layout) if EXCHANGE else row_layout
    if EXCHANGE:
        queue = gl.arange(0, QUEUES, gl.SliceLayout(0, words_layout))
        peer = queue // SLOTS
        slot = queue % SLOTS
        word_row = gl.arange(0, ROWS, by_row)
        if WORLD > 1:
            buffers = gl.load(peers + peer, mask=peer < WORLD, other=0)[None, :]
        else:
            buffers = (words + queue * 0).to(gl.int64)[None, :]
        mine = ((peer < WORLD) & _fills(part, slot, n_parts))[None, :]
        empty = (slot != part)[None, :]
        to_queue = (rank * SLOTS + slot)[None, :]
        pitch = _pitch(capacity.to(gl.int64), QUEUES)
        limits = gl.zeros([ROWS, QUEUES], gl.int64, words_layout) + limit_ns

    # The state of the tiles of the row to come that are here.
    by_thread: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, tile))
    zero = gl.zeros([ROWS, LANES], gl.float32, by_thread)
    c_held, s_held, ct_held, st_held, a_held = zero - INF, zero, zero - INF, zero, zero
    if WHOLE:
        c_held, s_held, ct_held, st_held, a_held = c_0, s_0, ct_0, st_0, a_0
        for tile_of_row in gl.static_range(HELD - LAG):
            if _always():
                c_held, s_held, ct_held, st_held, a_held = _held_state(
                    c_held, s_held, ct_held, st_held, a_held, shared_x, shared_t, 0, tile_of_row, tile_of_row + 1,
                    HELD - tile_of_row, valid, tile_columns * unit, k, k_t, vector, place, tile, VECTOR, LOSS, MASKED,
                    FEW,
                )  # fmt: skip
    else:
        c_held, s_held, ct_held, st_held, a_held = _held_state(
            c_held, s_held, ct_held, st_held, a_held, shared_x, shared_t, 0, 0, HELD, HELD + 1, valid,
            tile_columns * unit, k, k_t, vector, place, tile, VECTOR, LOSS, MASKED, FEW,
        )  # fmt: skip

    for step in range(steps):
        row = ((walker + step * walkers) * ROWS + row_in_tile).to(gl.int64)
        exists = row < n_rows
        counts = exists
        if LABELS:
            # x[label] is asked for before the wait, to be there after.
            label = _columns_of(this_label, vocab_size, ignore_index)
            local = (label - start).to(gl.int64)
            counts = label >= 0
            held = counts & (local >= 0) & (local < valid)
            at = row * (logits_row * unit) + (first * unit + local) * logits_column
            own = gl.load(logits + at, mask=held, other=0.0).to(gl.float32)
            last_label = _load_labels(target, row + 3 * walkers * ROWS, n_rows)
        _await_copies(LAG if WHOLE else HELD)
        x, t = _load(shared_x[HELD], shared_t[HELD], 0, valid, LAST, tile_columns * unit, vector, place, tile, VECTOR,
                     LABELS, MASKED)  # fmt: skip
        # The tile lives in registers: its place is free for the next row's.
        next_row = row + walkers * ROWS
        next_counts = _counts(next_row, next_label, n_rows, vocab_size, ignore_index, LABELS)
        _copy(shared_x[HELD], shared_t[HELD], 0, logits, target, next_row, next_counts, first, tile_columns, extent,
              HELD, logits_row, logits_column, target_row, target_column, vector, place, tile, VECTOR, LABELS, FULL,
              ALIGNED)  # fmt: skip
        c_thread, s, ct_thread, st, a, exp_x, kept = _thread_state(x, t, k, k_t, LOSS, FEW)
        c_held, s_held, ct_held, st_held, a_held = _held_state(
            c_held, s_held, ct_held, st_held, a_held, shared_x, shared_t, 0, HELD - LAG, HELD, 1, valid,
            tile_columns * unit, k, k_t, vector, place, tile, VECTOR, LOSS, MASKED, FEW,
        )  # fmt: skip
        c, s, ct, st, a = _add(c_held, s_held, ct_held, st_held, a_held, c_thread, s, ct_thread, st, a, LOSS)
        if LABELS:
            c, s, b, st, a = _merge(c, s, ct, st, a, 1, LOSS)
        else:
            c, s, b, st, a = _merge_threads(c, s, ct, st, a, ROW_WARPS, LOSS)
        c = gl.convert_layout(c, by_row)
        s = gl.convert_layout(s, by_row)
        b = gl.convert_layout(b, by_row)
        st = gl.convert_layout(st, by_row)
        a = gl.convert_layout(a, by_row)
        if LABELS:
            b = gl.convert_layout(own, by_row)
        if EXCHANGE:
            at = ((walker + step * walkers) * ROWS + word_row).to(gl.int64)
            there = (at < n_rows)[:, None]
            line = _word_at(epoch, half.to(gl.int64), at, 0, QUEUES)[:, None]
            sent = gl.where(mine & there, 1, 0)
            _publish(c, -INF, 0, buffers, line + to_queue, pitch, sent, empty, epoch, ROW_WARPS)
            _publish(s, 0.0, 1, buffers, line + to_queue, pitch, sent, empty, epoch, ROW_WARPS)
            if LABELS:
                _publish(b, 0.0, 2, buffers, line + to_queue, pitch, sent, empty, epoch, ROW_WARPS)
            else:
                _publish(b, -INF, 2, buffers, line + to_queue, pitch, sent, empty, epoch, ROW_WARPS)
                _publish(st, 0.0, 3, buffers, line + to_queue, pitch, sent, empty, epoch, ROW_WARPS)
                _publish(a, 0.0, 4, buffers, line + to_queue, pitch, sent, empty, epoch, ROW_WARPS)

        # The next row's first AHEAD tiles, while the words travel. The others come between tiles of the gradient: so
        # memory has stores and copies all the time, and copies have a whole step.
        c_held, s_held, ct_held, st_held, a_held = zero - INF, zero, zero - INF, zero, zero
        next_at = (step + 1) % 2
        c_held, s_held, ct_held, st_held, a_held = _held_state(
            c_held, s_held, ct_held, st_held, a_held, shared_x, shared_t, next_at, 0, FIRST_LOOK,
            HELD + 1 - FIRST_LOOK, valid,
            tile_columns * unit, k, k_t, vector, place, tile, VECTOR, LOSS, MASKED, FEW,
        )  # fmt: skip
        if EXCHANGE:
            # A first look, whose latency the last of those tiles hides.
            needed = there & (peer < WORLD)[None, :]
            inbox = words + line + queue[None, :]
            w_0, w_1, w_2, w_3, w_4 = _look(inbox, pitch, needed, WIDTH)
        c_held, s_held, ct_held, st_held, a_held = _held_state(
            c_held, s_held, ct_held, st_held, a_held, shared_x, shared_t, next_at, FIRST_LOOK, AHEAD,
            HELD + 1 - AHEAD, valid, tile_columns * unit, k, k_t, vector, place, tile, VECTOR, LOSS, MASKED, FEW,
        )  # fmt: skip

        if EXCHANGE:
            w_0, w_1, w_2, w_3, w_4, limits = _await(
                w_0, w_1, w_2, w_3, w_4, inbox, pitch, needed, epoch, limits, failed, WIDTH
            )
            if LABELS:
                b = _value(w_2, epoch, needed, 0.0)
            else:
                b = _value(w_2, epoch, needed, -INF)
            c, s, b, st, a = _merge(
                _value(w_0, epoch, needed, -INF), _value(w_1, epoch, needed, 0.0), b,
                _value(w_3, epoch, needed, 0.0), _value(w_4, epoch, needed, 0.0), 1, LOSS,
            )  # fmt: skip

        of_row, log_z = _row_loss(c, s, b, st, a, k, z_loss, LOSS, Z_LOSS)
        if part == 0:
            of_row = gl.where(gl.convert_layout(counts, by_row), of_row, 0.0)
            gl.store(row_loss + gl.convert_layout(row, by_row), of_row, mask=gl.convert_layout(exists, by_row))
        if REDUCE or EXCHANGE:
            if step == steps - 1:
                # All that others need of this program is there: they need not wait for its last gradient.
                _barrier()
                _arrive(control + 1)
        if GRAD:
            # All scales join in fp32, a row at a time, then a thread at a time; what reaches memory is rounded once.
            z_slope = 0.0
            if Z_LOSS:
                z_slope = 2.0 * z_loss * log_z * LN_2
            reference = gl.convert_layout(_reference(c), row_layout)
            if LOSS == "reverse_kl":
                factor = scale * LN_2 / s
            else:
                factor = scale * (1.0 + z_slope) / s
            factor = gl.where(counts, gl.convert_layout(factor, row_layout), 0.0)
            reference_thread = _row_to_thread(reference, by_thread)
            factor_thread = zero + _row_to_thread(factor, by_thread)
            reference_t = reference_thread
            second = factor_thread
            if not LABELS:
                reference_t = _row_to_thread(_reference(b), by_thread)
                if LOSS == "reverse_kl":
                    second = zero + _row_to_thread(a / s - z_slope * LOG2_E, by_thread)
                else:
                    second = zero + _row_to_thread((0.0 - scale) / st, by_thread)
            if not WHOLE:
                _write_kept(grad, exp_x, kept, c_thread, ct_thread, reference_thread, reference_t, factor_thread,
                            second, row, exists, first, tile_columns, extent, valid, LAST, grad_row, grad_column,
                            vector, place, tile, VECTOR, LOSS, FULL, MASKED, ALIGNED)  # fmt: skip
        here = 0
        copied_row = next_row
        copied = next_counts
        if not WHOLE:
            here = step % 2
            copied_row = next_row + walkers * ROWS
            copied = _counts(copied_row, later_label, n_rows, vocab_size, ignore_index, LABELS)
        for tile_of_row in gl.static_range(HELD):
            if WHOLE and tile_of_row == HELD - LAG:
                _await_copies(HELD - LAG)
                x_0, t_0 = _load(shared_x[HELD], shared_t[HELD], 0, valid, HELD, tile_columns * unit, vector, place,
                                 tile, VECTOR, LABELS, MASKED)  # fmt: skip
                _copy(shared_x[HELD], shared_t[HELD], 0, logits, target, next_row, next_counts, first, tile_columns,
                      extent, LAST, logits_row, logits_column, target_row, target_column, vector, place, tile, VECTOR,
                      LABELS, FULL, ALIGNED)  # fmt: skip
                c_0, s_0, ct_0, st_0, a_0, exp_0, kept_0 = _thread_state(x_0, t_0, k, k_t, LOSS, FEW)
                c_held, s_held, ct_held, st_held, a_held = _add(c_held, s_held, ct_held, st_held, a_held, c_0, s_0,
                                                                ct_0, st_0, a_0, LOSS)  # fmt: skip
            if tile_of_row % READ == 0:
                if GRAD:
                    read = ()
                    for each in gl.static_range(tile_of_row, tile_of_row + READ):
                        both = _load(shared_x[each], shared_t[each], here, valid, each, tile_columns * unit, vector,
                                     place, tile, VECTOR, LABELS, MASKED)  # fmt: skip
                        read = read + (both,)  # type: ignore[assignment]  # noqa: RUF005
                for each in gl.static_range(tile_of_row, tile_of_row + READ):
                    _copy(shared_x[each], shared_t[each], here, logits, target, copied_row, copied, first,
                          tile_columns, extent, each, logits_row, logits_column, target_row, target_column, vector,
                          place, tile, VECTOR, LABELS, FULL, ALIGNED)  # fmt: skip
            if GRAD:
                if WHOLE:
                    if tile_of_row == 0:
                        if _always():
                            _write_kept(grad, exp_x, kept, c_thread, ct_thread, reference_thread, reference_t,
                                        factor_thread, second, row, exists, first, tile_columns, extent, valid, LAST,
                                        grad_row, grad_column, vector, place, tile, VECTOR, LOSS, FULL, MASKED,
                                        ALIGNED)  # fmt: skip
                        _write_kept(grad, exp_0, kept_0, c_0, ct_0, reference_thread, reference_t, factor_thread,
                                    second, row, exists, first, tile_columns, extent, valid, HELD, grad_row,
                                    grad_column, vector, place, tile, VECTOR, LOSS, FULL, MASKED,
                                    ALIGNED)  # fmt: skip
                if _always(WHOLE):
                    _write_held(grad, read[tile_of_row % READ][0], read[tile_of_row % READ][1], k, k_t,
                                reference_thread, reference_t, factor_thread, second, row, exists, first, tile_columns,
                                extent, valid, tile_of_row, grad_row, grad_column, vector, place, tile, VECTOR, LOSS,
                                FULL, MASKED, ALIGNED, FEW)  # fmt: skip
            if not WHOLE and tile_of_row >= AHEAD:
                c_held, s_held, ct_held, st_held, a_held = _held_state(
                    c_held, s_held, ct_held, st_held, a_held, shared_x, shared_t, next_at, tile_of_row,
                    tile_of_row + 1, HELD + READ - tile_of_row % READ, valid, tile_columns * unit, k, k_t, vector,
                    place, tile, VECTOR, LOSS, MASKED, FEW,
                )  # fmt: skip
            if WHOLE and tile_of_row >= LAG:
                c_held, s_held, ct_held, st_held, a_held = _held_state(
                    c_held, s_held, ct_held, st_held, a_held, shared_x, shared_t, 0, tile_of_row - LAG,
                    tile_of_row - LAG + 1, LAG + READ - 1 - tile_of_row % READ + (tile_of_row >= HELD - LAG), valid,
                    tile_columns * unit, k, k_t, vector, place, tile, VECTOR, LOSS, MASKED, FEW,
                )  # fmt: skip

        if LABELS:
            if GRAD:
                # The label's own element: one store more is cheaper than a comparison with every column.
                at_label = _exp2(gl.fma(own, k, 0.0 - reference)) * factor - scale
                at = row * (grad_row * unit) + (first * unit + local) * grad_column
                _barrier()
                gl.store(grad + at, at_label.to(grad.dtype.element_ty), mask=held)
            this_label = next_label
            next_label = later_label
            later_label = last_label

    # Copies of rows past the last are under way, of zeros: not into what the compiler uses now for other things.
    _await_copies(0)
    # The last program, which has the fewest rows, sums the rows' losses, in one order, once all are there, and makes
    # the next launch's epoch. It waits for programs that do not wait for it.
    if REDUCE or EXCHANGE:
        if gl.program_id(0) == gl.num_programs(0) - 1:
            _await_arrivals(control + 1, gl.num_programs(0))
            _barrier()
            if REDUCE:
                all_rows: gl.constexpr = gl.BlockedLayout([4], [32], [num_warps], [0])
                total_loss = gl.zeros([AT_ONCE], gl.float32, all_rows)
                for begin in range(0, n_rows, AT_ONCE):
                    each = begin + gl.arange(0, AT_ONCE, all_rows)
                    total_loss += gl.load(row_loss + each, mask=each < n_rows, other=0.0, volatile=True)
                gl.store(loss, gl.sum(total_loss, axis=0) * (loss_scale * inverse_count))
            gl.store(control + 1, 0)
            if EXCHANGE:
                gl.store(control, epoch)
