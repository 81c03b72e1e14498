"""The model from the transformers package: its configuration, weights and inputs."""
