"""Copies within one GPU that can run while a kernel occupies the SMs."""

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
    """Copy on the current stream in the way that the driver prefers beside computation; return false if it cannot.

    An ordinary copy within a GPU is a kernel and waits for free SMs. In traces of H200s (driver 580) this copy waits
    too, but only until the last wave of the product beside it.

    Both tensors are contiguous and of one size. The current stream must not be one of CUDA's default streams. Returns
    false without copying during graph capture and with drivers before CUDA 13, which lack such copies. Raises
    RuntimeError if the driver returns an error.
    """
    if not cuda_driver.has(COPY) or torch.cuda.is_current_stream_capturing():
        return False
    cuda_driver.call(
        COPY,
        ctypes.byref(ctypes.c_uint64(into.data_ptr())),
        ctypes.byref(ctypes.c_uint64(source.data_ptr())),
        ctypes.byref(ctypes.c_size_t(into.nbytes)),
        ctypes.c_size_t(1),  # number of copies
        ctypes.byref(_Attributes(order=IN_STREAM_ORDER, flags=BESIDE_COMPUTE)),
        ctypes.byref(ctypes.c_size_t(0)),  # first copy that the attributes apply to
        ctypes.c_size_t(1),  # number of attributes
        cuda_driver.current_stream(),
    )
    return True
