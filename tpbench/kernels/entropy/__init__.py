"""The entropy loss of given logits: the function, the torch module, and the choice of the kernels."""
