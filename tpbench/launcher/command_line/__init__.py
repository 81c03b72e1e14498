"""The command line before Hydra parses it, and the users' files that it names."""
