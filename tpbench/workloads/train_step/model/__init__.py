"""The model from the transformers package: its configuration, sizes, weights, norms, attention and inputs.

The modules, in the order of a first reading: `config_json` of a model's `folder`, `configuration` with `attention` and
`sliding_window`, `models` with `norms` and `weights`, `decoder_parts`, `inputs`, `logits_change`, and `sizes`.
"""
