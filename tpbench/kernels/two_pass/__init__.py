"""The entropy loss by kernels in Triton that go over each row twice."""
