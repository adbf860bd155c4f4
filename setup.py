"""Installs attnres_jax. `make test` and `make ablation` call it for you."""

from setuptools import find_packages, setup

HF = ["datasets>=3.0", "pyarrow>=17"]

setup(
  name="attnres_jax",
  version="0.1.0",
  description=(
    "Attention Residuals (arXiv:2603.15031) in JAX and Flax: a reference"
    " implementation with the paper's ablation table as one command"
  ),
  license="Apache-2.0",
  python_requires=">=3.11",
  # configs/ and scripts/ are run from the checkout (`python -m scripts.train`)
  # and are not installed: their names are too plain for site-packages.
  # The folder `kernels` is imported as attnres_kernels: its plain name is
  # taken on the package index.
  package_dir={"attnres_kernels": "kernels"},
  packages=[
    *find_packages(include=["attnres_jax", "attnres_jax.*"]),
    "attnres_kernels",
    "attnres_kernels.depth_attention",
  ],
  package_data={
    "attnres_jax.data": ["assets/*"],
    "attnres_kernels.depth_attention": ["tuned/*.json"],
  },
  # Lower bounds are the oldest releases the suite has run on; no upper bounds,
  # .ci/run tries the newest.
  install_requires=[
    "absl-py>=2.1",
    "array_record>=0.8",
    "flax>=0.12",
    "grain>=0.2.18",
    "jax>=0.10.2",
    "jaxtyping>=0.3",
    "matplotlib>=3.9",
    "ml_collections>=1.1",
    "numpy>=2.0",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12",
    "tensorboardX>=2.6",
    "tokenizers>=0.21",
    "tqdm>=4.66",
  ],
  extras_require={
    "tpu": ["jax[tpu]>=0.10.2"],
    "hf": HF,
    "notebooks": ["jupyterlab>=4", "ipykernel>=6", "pandas>=2.2"],
    "dev": [
      *HF,
      "hypothesis>=6.100",
      "pytest>=8.3",
      "pytest-xdist>=3.6",
      "ruff>=0.17,<0.18",  # another minor release formats differently
    ],
  },
)
