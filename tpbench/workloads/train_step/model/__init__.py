"""The model from the transformers package: its configuration, sizes, weights and inputs.

The modules, in the order of a first reading: `config_json` of a model's folder, `configuration`, `models`, `weights`,
`inputs`, and `sizes`.
"""
