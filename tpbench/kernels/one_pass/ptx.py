"""PTX instructions that Gluon has no function for, each under a name."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Triton 3.7 renamed these two.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.constexpr_function
def _constraints(output, outputs, input, inputs):
    return ",".join([output] * outputs + [input] * inputs)


@gluon.jit
def first(a, b):
    """Combine equal values in a reduction: return either of them."""
    return a


@gluon.jit
def _compute(CODE: gl.constexpr, CONSTRAINTS: gl.constexpr, values, PACK: gl.constexpr):
    """Instructions that only compute, for PACK elements at a time. Returns fp32 numbers."""
    return gl.inline_asm_elementwise(CODE, CONSTRAINTS, values, dtype=gl.float32, is_pure=True, pack=PACK)


@gluon.jit
def _act(CODE: gl.constexpr, CONSTRAINTS: gl.constexpr, values):
    """Instructions that do more than compute. Returns an int32."""
    return gl.inline_asm_elementwise(CODE, CONSTRAINTS, values, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def exp2(x):
    """2^x. Denormal results become zero: ex2.approx without .ftz spends three more instructions on them."""
    return _compute("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], 1)


@gluon.jit
def log2(x):
    """The logarithm of numbers that are normal and positive, which needs one instruction."""
    return _compute("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], 1)


@gluon.constexpr_function
def _sigmoids(count, factor):
    """Write 1 / (1 + 2^(factor * value)) of 1 or 4 values. Four of them share a reciprocal."""
    # The exponent is at most 30: a product of four is finite, and the sigmoid is 0 to the precision of 1 anyway.
    code = "{.reg .f32 d<4>, a, b, r;" + "".join(
        f"mul.f32 d{value}, ${count + value}, {factor:.12e}; min.NaN.f32 d{value}, d{value}, 0f41F00000;"
        f"ex2.approx.ftz.f32 d{value}, d{value}; add.f32 d{value}, d{value}, 0f3F800000;"
        for value in range(count)
    )
    if count == 1:
        return code + "rcp.approx.ftz.f32 $0, d0;}"
    code += "mul.f32 a, d0, d1; mul.f32 b, d2, d3; mul.f32 r, a, b; rcp.approx.ftz.f32 r, r;"
    code += "mul.f32 a, a, r; mul.f32 b, b, r;"
    return code + "mul.f32 $0, b, d1; mul.f32 $1, b, d0; mul.f32 $2, a, d3; mul.f32 $3, a, d2;}"


@gluon.jit
def sigmoids(values, FACTOR: gl.constexpr):
    """1 / (1 + 2^(FACTOR * values)) in fp32, for any number of dimensions."""
    count: gl.constexpr = 4 if len(values.type.shape) == 4 and values.type.shape[3] % 4 == 0 else 1
    return _compute(_sigmoids(count, FACTOR), _constraints("=f", count, "f", count), [values], count)


@gluon.jit
def await_copies(LATER: gl.constexpr):
    """Wait for the asynchronous copies of this thread, except for the last LATER groups.

    `async_copy.wait_group` adds a barrier. No barrier is needed: a thread reads from shared memory only its own copies.
    """
    code: gl.constexpr = f"cp.async.wait_group {LATER}; mov.b32 $0, 0;"
    _act(code, "=r,~{memory}", [])


@gluon.jit
def opaque_true():
    """Return true, a value that the compiler doesn't know: a branch on it is a scheduling barrier.

    Without the barrier the compiler computes as much as the registers hold before it starts copies and stores.
    """
    return _act("mov.u32 $0, %nctaid.y;", "=r", []) > 0


@gluon.jit
def opaque_zero():
    """Return zero, a value that the compiler doesn't know. What depends on it is computed where it is needed."""
    return _act("mov.u32 $0, %nctaid.y; sub.s32 $0, $0, 1;", "=r", [])


@gluon.jit
def multiply_nonzero(weight, difference):
    """weight * difference, or 0 where the weight is 0, even if the difference is infinite. Two instructions."""
    code: gl.constexpr = """{
        .reg .pred counts;
        setp.neu.f32 counts, $1, 0f00000000;
        mov.f32 $0, $1;
        @counts mul.f32 $0, $1, $2;
        }"""
    return _compute(code, "=&f,f,f", [weight, difference], 1)


@gluon.constexpr_function
def _sum_of_products(count, finite):
    """Write the sum of `count` products to each output. Unless all are finite, those with the weight 0 are left out."""
    outputs, weights, values = (range(first, first + count) for first in (0, count, 2 * count))
    return (
        "{.reg .pred counts; .reg .f32 total; mov.f32 total, 0f00000000;"
        + "".join(
            ("" if finite else f"setp.neu.f32 counts, ${weight}, 0f00000000; @counts ")
            + f"fma.rn.f32 total, ${weight}, ${value}, total;"
            for weight, value in zip(weights, values, strict=True)
        )
        + "".join(f"mov.f32 ${output}, total;" for output in outputs)
        + "}"
    )


@gluon.jit
def sum_products_in_thread(weight, difference, FINITE: gl.constexpr = False):
    """Sum `multiply_nonzero` within each thread: (ROWS, REPEATS, LANES, VECTOR) to (ROWS, LANES).

    This takes a multiply-add per element and, unless products are FINITE, a comparison, which later ones wait for.
    """
    count: gl.constexpr = weight.type.shape[3]
    constraints: gl.constexpr = _constraints("=f", count, "f", 2 * count)
    by_vector = _compute(_sum_of_products(count, FINITE), constraints, [weight, difference], count)
    return gl.sum(gl.reduce(by_vector, 3, first), axis=1)


@gluon.constexpr_function
def _max_of_pairs(count):
    """Write the maximum of `count` bf16 numbers to each output in fp32. Two numbers are compared at a time."""
    pairs = range(count + 1, count + count // 2)
    return (
        f"{{.reg .b32 pair, low; .reg .f32 other, most; mov.b32 pair, ${count};"
        + "".join(f"max.bf16x2 pair, pair, ${number};" for number in pairs)
        + "shl.b32 low, pair, 16; and.b32 pair, pair, 0xffff0000; mov.b32 other, low; mov.b32 most, pair;"
        + "max.f32 most, most, other;"
        + "".join(f"mov.f32 ${output}, most;" for output in range(count))
        + "}"
    )


@gluon.jit
def max_in_thread(values):
    """Maximum within each thread in fp32: (ROWS, REPEATS, LANES, VECTOR) to (ROWS, LANES)."""
    if values.dtype == gl.bfloat16 and values.type.shape[3] > 1:
        count: gl.constexpr = values.type.shape[1] * values.type.shape[3]
        constraints: gl.constexpr = _constraints("=f", count, "r", count // 2)
        values = _compute(_max_of_pairs(count), constraints, [values], count)
        return gl.reduce(gl.reduce(values, 3, first), 1, first)
    else:
        values = values.to(gl.float32)
        return gl.max(gl.max(values, axis=3), axis=1)


_NOTHING = {"bf16": "0xff80ff80", "fp16": "0xfc00fc00", "fp32": "0fff800000"}
"""-inf by dtype, in 4 bytes."""


@gluon.constexpr_function
def _select_vector(registers, dtype):
    """Write `registers` inputs of 4 bytes, or -inf if the input after them is 0."""
    kind = "f32" if str(dtype) == "fp32" else "b32"
    select = f"selp.{kind} ${{}}, ${{}}, {_NOTHING[str(dtype)]}, kept;"
    selected = (select.format(output, registers + output) for output in range(registers))
    return f"{{.reg .pred kept; setp.ne.b32 kept, ${2 * registers}, 0;{''.join(selected)}}}"


@gluon.jit
def keep_vectors(values, kept):
    """Return whole vectors of logits, or -inf where `kept` is 0, an instruction for every 4 bytes.

    Both: (ROWS, REPEATS, LANES, VECTOR). The first number of `kept` in each vector decides.
    """
    count: gl.constexpr = values.type.shape[3]
    registers: gl.constexpr = count * values.dtype.primitive_bitwidth // 32
    kind: gl.constexpr = "f" if values.dtype == gl.float32 else "r"
    constraints: gl.constexpr = _constraints("=" + kind, registers, kind, registers) + ",r" * count
    return gl.inline_asm_elementwise(
        _select_vector(registers, values.dtype), constraints, [values, kept], dtype=values.dtype, is_pure=True,
        pack=count,
    )  # fmt: skip


@gluon.jit
def to_fp32(values):
    """Convert to fp32: two bf16 numbers in two instructions, where the compiler takes three."""
    if values.dtype == gl.bfloat16 and values.type.shape[3] > 1:
        return _compute("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [values], 2)
    else:
        return values.to(gl.float32)


@gluon.jit
def send_word(address, word, sent, SPEC: gl.constexpr):
    """Store words at addresses of any rank, (ROWS, RANKS * SLOTS), where `sent` is not 0.

    Of the warps that share a row, the first one stores.
    """
    warp_in_row: gl.constexpr = 32 * (SPEC.WARPS // SPEC.ROW_WARPS) - 32
    code: gl.constexpr = f"""{{
        .reg .pred p;
        .reg .b32 t;
        mov.u32 t, %tid.x;
        and.b32 t, t, {warp_in_row};
        setp.eq.u32 p, t, 0;
        setp.ne.and.b32 p, $3, 0, p;
        @p st.relaxed.sys.global.b64 [$1], $2;
        mov.b32 $0, 0;
        }}"""
    _act(code, "=r,l,l,r", [address, word, sent])


@gluon.constexpr_function
def _poll_words(width):
    """Poll the `width` words of a thread's place until all carry the epoch, or the limit has passed: then it is 0."""
    words = range(width)
    wanted, limit, pointer, pitch = 2 * width + 1, 2 * width + 2, 2 * width + 3, 2 * width + 4
    epoch, failed = 2 * width + 5, 2 * width + 6
    differ = "setp.eq.b32 late, 1, 0;" + "".join(
        f"mov.b64 {{number, stamp}}, ${word}; setp.ne.or.b32 late, stamp, ${epoch}, late;" for word in words
    )
    differ += f"setp.ne.and.b32 late, ${wanted}, 0, late;"
    return (
        "{.reg .pred late, over; .reg .b32 number, stamp; .reg .b64 began, now, place;"
        + "".join(f"mov.b64 ${word}, ${width + 1 + word};" for word in words)
        + f"mov.b64 ${width}, ${limit}; {differ} @!late bra THERE; mov.u64 began, %globaltimer;"
        + f"AGAIN: mov.b64 place, ${pointer};"
        + "".join(f"ld.relaxed.sys.global.b64 ${word}, [place]; add.s64 place, place, ${pitch};" for word in words)
        + f"{differ} @!late bra THERE; mov.u64 now, %globaltimer; sub.s64 now, now, began;"
        + f"setp.gt.s64 over, now, ${width}; @!over bra AGAIN; mov.b64 ${width}, 0;"
        + f"mov.b32 number, 1; st.global.b32 [${failed}], number; THERE: }}"
    )


@gluon.constexpr_function
def _int64(count):
    return (gl.int64,) * count


@gluon.jit
def await_words(words, needed, limits, address, pitch, epoch, failed):
    """Wait until the words at `address` and one pitch apart carry the epoch.

    All arguments have the shape (ROWS, RANKS * SLOTS); `words` holds the words as last read. Returns the words, and in
    nanoseconds how long the next wait may take.
    """
    arguments = words + (needed, limits, address, pitch, epoch, failed)
    constraints: gl.constexpr = _constraints("=&l", len(words) + 1, "l", len(words)) + ",r,l,l,l,r,l"
    return gl.inline_asm_elementwise(
        _poll_words(len(words)), constraints, arguments, dtype=_int64(len(words) + 1), is_pure=False, pack=1
    )


@gluon.constexpr_function
def _vote(count):
    """Write 1 to `count` outputs if no thread of the program has an input of 0, else 0. It is a barrier."""
    return (
        "{.reg .pred all; .reg .b32 least; mov.b32 least, 1;"
        + "".join(f"min.s32 least, least, ${value};" for value in range(count, 2 * count))
        + "setp.gt.s32 all, least, 0; bar.red.and.pred all, 0, all; selp.b32 least, 1, 0, all;"
        + "".join(f"mov.b32 ${output}, least;" for output in range(count))
        + "}"
    )


@gluon.jit
def vote(values, SPEC: gl.constexpr):
    """Return 1 everywhere if all numbers of the program, (ROWS, RANKS * SLOTS), are 1, else 0."""
    by_lane: gl.constexpr = values.type.shape[1] // 32 if values.type.shape[1] > 32 else 1
    count: gl.constexpr = SPEC.ROWS // SPEC.ROW_WARPS * by_lane  # numbers of a thread
    constraints: gl.constexpr = _constraints("=r", count, "r", count) + ",~{memory}"
    return gl.inline_asm_elementwise(_vote(count), constraints, [values], dtype=gl.int32, is_pure=False, pack=count)


@gluon.jit
def arrive(counter):
    """Add one to `counter`, which publishes what the program's threads stored before a barrier. Does not wait."""
    code: gl.constexpr = """{
        .reg .pred p;
        .reg .b32 t;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        @p red.release.gpu.global.add.u32 [$1], 1;
        mov.b32 $0, 0;
        }"""
    _act(code, "=r,l,~{memory}", [counter.to(gl.int64)])


@gluon.jit
def await_arrivals(counter, count):
    """Wait until `counter` has reached `count`."""
    code: gl.constexpr = (
        "{.reg .pred p; AGAIN: ld.acquire.gpu.global.u32 $0, [$1]; setp.lt.u32 p, $0, $2; @p bra AGAIN;}"
    )
    _act(code, "=&r,l,r,~{memory}", [counter.to(gl.int64), count])
