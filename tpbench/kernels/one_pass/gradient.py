"""Gradients of tiles, from tiles in registers or from raw logits in shared memory."""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
# Triton decides the types of a kernel's arguments.
# ruff: noqa: SIM108
# Triton leaves a branch uncompiled only where both branches are written out.

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpbench.kernels.one_pass.layouts import (
    column_unit,
    has_labels,
    row_layout,
    row_to_thread,
    thread_layout,
    thread_shape,
)
from tpbench.kernels.one_pass.ptx import barrier, exp2, multiply_nonzero, to_fp32
from tpbench.kernels.one_pass.state import LN_2, few_instructions, reference
from tpbench.kernels.one_pass.tiles import addresses, existing_mask

LOG2_E = gl.constexpr(1.4426950408889634)


class Factors(NamedTuple):
    """Numbers that turn exponentials into gradients: of rows for the label's element, of threads for tiles."""

    row_reference: Any
    """(ROWS,)"""
    row_factor: Any
    """(ROWS,)"""
    reference: Any
    """(ROWS, 1): the reference of the exponents of logits."""
    reference_t: Any
    """(ROWS, 1): the reference of the exponents of target logits."""
    factor: Any
    """(ROWS, LANES): all scales over the sum of exponentials. 0 for rows that do not count."""
    second: Any
    """(ROWS, LANES): for reverse_kl the mean difference, for the others the factor of the targets' exponentials."""


@gluon.jit
def gradient_factors(state, log_z, counts, scale, scales, SPEC: gl.constexpr):
    """The `Factors` of rows. All scales join in fp32, first by row, then by thread; the gradient is rounded once.

    state, log_z: (ROWS,) of the whole vocabulary. counts: (ROWS,) rows with a gradient. scale: factor on the gradient.
    """
    z_slope = 0.0
    if SPEC.Z_LOSS:
        z_slope = 2.0 * scales.z_loss * log_z * LN_2
    row_reference = gl.convert_layout(reference(state.c), row_layout(SPEC))
    if SPEC.LOSS == "reverse_kl":
        factor = scale * LN_2 / state.s
    else:
        factor = scale * (1.0 + z_slope) / state.s
    row_factor = gl.where(counts, gl.convert_layout(factor, row_layout(SPEC)), 0.0)
    zero = gl.zeros(thread_shape(SPEC), gl.float32, thread_layout(SPEC))
    reference_x = row_to_thread(row_reference, SPEC)
    factor = zero + row_to_thread(row_factor, SPEC)
    reference_t = reference_x
    second = factor
    if not has_labels(SPEC):
        reference_t = row_to_thread(reference(state.c_t), SPEC)
        if SPEC.LOSS == "reverse_kl":
            second = zero + row_to_thread(state.a / state.s - z_slope * LOG2_E, SPEC)
        else:
            second = zero + row_to_thread((0.0 - scale) / state.s_t, SPEC)
    return Factors(row_reference, row_factor, reference_x, reference_t, factor, second)


@gluon.jit
def _store(walk, g, row, exists, tile_of_row, SPEC: gl.constexpr):
    """Store the gradient of a tile, (ROWS, REPEATS, LANES, VECTOR) in fp32."""
    part = walk.part
    if SPEC.MASKED:
        column = (part.vector * SPEC.VECTOR + part.place) + gl.zeros_like(g).to(gl.int32)
        inside = column < part.valid - tile_of_row * part.tile_units * column_unit(SPEC)
        g = gl.where(inside, g, 0.0)
    extent = gl.minimum(part.extent - tile_of_row * part.tile_units, part.tile_units)
    inside = existing_mask(exists, part, extent, SPEC)
    begin = part.first + tile_of_row * part.tile_units
    to = addresses(walk.grad, row, begin, part, SPEC)
    gl.store(to, g.to(walk.grad.pointer.dtype.element_ty), mask=inside)


@gluon.jit
def store_from_registers(walk, tile, factors, row, exists, tile_of_row, SPEC: gl.constexpr):
    """Store the gradient of a tile in registers (`TileState`), whose exponentials are relative to each thread's c."""
    g = tile.exp_x * (exp2(tile.state.c - factors.reference) * factors.factor)[:, None, :, None]
    if SPEC.LOSS == "reverse_kl":
        shift_x = reference(tile.state.c) - factors.reference
        shift_t = reference(tile.state.c_t) - factors.reference_t
        g = multiply_nonzero(g, tile.other + (shift_x - shift_t - factors.second)[:, None, :, None])
    elif not has_labels(SPEC):
        factor_t = exp2(tile.state.c_t - factors.reference_t) * factors.second
        g = gl.fma(tile.other, factor_t[:, None, :, None], g)
    _store(walk, g, row, exists, tile_of_row, SPEC)


@gluon.jit
def store_from_logits(walk, raw, scales, factors, row, exists, tile_of_row, SPEC: gl.constexpr):
    """Store the gradient of a tile of raw logits and target logits, `raw`, (ROWS, REPEATS, LANES, VECTOR) each."""
    FEW: gl.constexpr = few_instructions(SPEC)
    x = gl.fma(to_fp32(raw[0], FEW), scales.k, 0.0 - factors.reference[:, None, :, None])
    g = exp2(x)
    if has_labels(SPEC):
        g *= factors.factor[:, None, :, None]
    else:
        t = gl.fma(to_fp32(raw[1], FEW), scales.k_t, 0.0 - factors.reference_t[:, None, :, None])
        if SPEC.LOSS == "reverse_kl":
            # The mean joins as a term: subtracted from a large reference it would lose that reference's last bits.
            offset = 0.0 - factors.factor * factors.second
            g = multiply_nonzero(g, gl.fma(x - t, factors.factor[:, None, :, None], offset[:, None, :, None]))
        else:
            g = gl.fma(exp2(t), factors.second[:, None, :, None], g * factors.factor[:, None, :, None])
    _store(walk, g, row, exists, tile_of_row, SPEC)


@gluon.jit
def store_at_label(walk, label, factors, scale, row, scales, SPEC: gl.constexpr):
    """Store the gradient of the label's own element again, (ROWS,): cheaper than to compare every column with it."""
    grad = walk.grad
    at_label = exp2(gl.fma(label.logit, scales.k, 0.0 - factors.row_reference)) * factors.row_factor - scale
    at = row * (grad.row * column_unit(SPEC)) + (walk.part.first * column_unit(SPEC) + label.local) * grad.column
    barrier()
    gl.store(grad.pointer + at, at_label.to(grad.pointer.dtype.element_ty), mask=label.held)
