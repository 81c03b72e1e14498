"""Bytes of an element, by dtype. Without torch."""

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
