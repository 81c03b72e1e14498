"""The styles in which a module can be sharded over tensor-parallel ranks, and a user's mapping of modules to styles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from tpbench.settings import JobError
from tpbench.suggestions import unknown

Style = Literal["colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "replicated"]
"""How a module of a block is sharded.

- colwise: a rank computes a share of a linear layer's output columns.
- rowwise: a rank has a share of the input's columns. Outputs are summed over the ranks.
- colwise_gather_output: as colwise. Then every rank gathers all output columns.
- rowwise_split_input: as rowwise. A rank takes its columns of an input that it has whole.
- replicated: every rank has the whole module.
"""
STYLES: tuple[str, ...] = get_args(Style)
SYNONYMS = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "replicated_with_grad_allreduce": "replicated",
}
"""Other names of a style in plans of transformers. The sum over ranks of a replicated module's gradient follows from
the module's place."""

PLANS: Mapping[str, Mapping[str, Style]] = {
    # BitNet has norms before the last product of attention and of the feed-forward layers. They need all columns.
    "bitnet": {
        "layers.*.self_attn.[qkv]_proj": "colwise_gather_output",
        "layers.*.self_attn.o_proj": "rowwise_split_input",
        "layers.*.mlp.gate_proj": "colwise_gather_output",
        "layers.*.mlp.up_proj": "colwise_gather_output",
        "layers.*.mlp.down_proj": "rowwise_split_input",
    },
    # Transformers has no plan. The joint product has the query, key and value of one head after those of another.
    "persimmon": {
        "layers.*.self_attn.query_key_value": "colwise",
        "layers.*.self_attn.dense": "rowwise",
        "layers.*.mlp.dense_h_to_4h": "colwise",
        "layers.*.mlp.dense_4h_to_h": "rowwise",
    },
}
"""Plans, in place of those of transformers, by model type: the style by pattern of module names."""


def parse_mapping(text: str | None) -> dict[str, str]:
    """Return the styles by pattern of module names, in order, from JSON such as `{"layers.*.mlp.up_proj": "colwise"}`.

    Raises JobError for text that is no such object, and for a style that does not exist.
    """
    if text is None:
        return {}
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not content:
        raise JobError(
            f"tp_mapping={text} must be an object of module patterns and styles, such as "
            '{"layers.*.mlp.up_proj": "colwise"}'
        )
    for pattern, style in content.items():
        if style not in STYLES:
            raise JobError(f"tp_mapping, {pattern}: {unknown('style', style, STYLES)}")
    return {pattern.removeprefix("model."): style for pattern, style in content.items()}
