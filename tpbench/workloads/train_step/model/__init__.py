"""The model from the transformers package: its configuration, sizes, weights and inputs.

The modules, in the order of a first reading: `resolve` completes the model that a problem names; then `configuration`,
`models`, `weights`, `inputs`, and `sizes`.
"""
