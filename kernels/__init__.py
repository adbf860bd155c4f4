"""Kernels of attnres_jax, importable without it as `attnres_kernels`."""
