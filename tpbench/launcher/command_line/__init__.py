"""The command line before Hydra parses it: checks, rewrites, and the users' files that it names."""
