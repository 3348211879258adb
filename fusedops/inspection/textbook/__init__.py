"""Kernels as tutorials and textbooks write them in Triton: what fusedops' own are compared with."""
