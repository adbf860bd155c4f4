"""Result lines name the commit they come from."""

import pathlib
import re

import pytest

from attnres_jax import provenance

REPO = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.fast
@pytest.mark.skipif(not (REPO / ".git").exists(), reason="not a git checkout")
def test_commit_is_that_of_the_checkout():
  assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", provenance.commit())


@pytest.mark.fast
def test_code_that_results_depend_on_exists():
  assert all((REPO / name).exists() for name in provenance.CODE)
