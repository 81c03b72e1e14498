"""Bytes that exchanges send, the rates of the links, and the density at which the dense exchange becomes faster."""
