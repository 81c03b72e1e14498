"""Copies within a GPU beside its products."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tpbench.comm import cuda_driver

IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
BESIDE_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
COPY = "cuMemcpyBatchAsync_v2"


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("order", ctypes.c_int),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    ]


def copy_beside_compute(into: Tensor, source: Tensor) -> bool:
    """Copy on the current stream, which is none of CUDA's default ones, in the way that the driver prefers beside
    computation. An ordinary copy within a GPU is a kernel and waits for SMs; in traces of H200s (driver 580) so does
    this one, but from a product's last wave on. Both contiguous and of one size. False, and nothing is done, where the
    driver has no such copies (before CUDA 13) or a graph is being captured. RuntimeError where the driver refuses."""
    if not cuda_driver.has(COPY) or torch.cuda.is_current_stream_capturing():
        return False
    cuda_driver.call(
        COPY,
        ctypes.byref(ctypes.c_uint64(into.data_ptr())),
        ctypes.byref(ctypes.c_uint64(source.data_ptr())),
        ctypes.byref(ctypes.c_size_t(into.nbytes)),
        ctypes.c_size_t(1),  # copies
        ctypes.byref(_Attributes(order=IN_STREAM_ORDER, flags=BESIDE_COMPUTE)),
        ctypes.byref(ctypes.c_size_t(0)),  # the first copy that these are of
        ctypes.c_size_t(1),  # attributes
        cuda_driver.current_stream(),
    )
    return True
