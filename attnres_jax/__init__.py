"""Attention Residuals (arXiv:2603.15031) in JAX: depth mixing by attention."""
