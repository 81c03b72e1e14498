"""The GPUs and CPU cores of this host, and leases of them."""
