"""Compile kernels for any GPU without one, and read what the compiler made of them."""
