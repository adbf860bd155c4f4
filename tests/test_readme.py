"""What the README shows works: its commands parse, its example runs."""

import importlib
import pathlib
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.config import validate
from attnres_jax.depth_mixing import base, registry
from configs import train

README = pathlib.Path(__file__).parent.parent / "README.md"
pytestmark = pytest.mark.fast


def commands():
  text = README.read_text().replace("\\\n", " ")
  return sorted(set(re.findall(r"python -m scripts\.[^\n`#]*", text)))


@pytest.mark.parametrize("command", commands())
def test_command_parses(command):
  """The script exists, and its config with every override is valid."""
  _, _, module, *flags = shlex.split(command)
  importlib.util.find_spec(module) or pytest.fail(f"no module {module}")
  path = [f for f in flags if f.startswith("--config=")]
  if not path:
    return
  file, _, argument = path[0].removeprefix("--config=").partition(":")
  name = file.removesuffix(".py").replace("/", ".")
  config = importlib.import_module(name).get_config(argument or None)
  for flag in flags:
    if flag.startswith("--config."):
      key, value = flag.removeprefix("--config.").split("=")
      old = config
      for part in key.split("."):
        old = old[part]
      config.update_from_flattened_dict({key: type(old)(value)})
  if name == "configs.train":
    validate(config)


def test_example_mechanism(monkeypatch):
  """The worked example of "Add a mechanism", through registry and config."""
  (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
  namespace = {}
  exec(compile(code, "README.md", "exec"), namespace)
  monkeypatch.setitem(registry.MIXERS, "rezero", namespace["ReZero"])
  config = train.get_config("mixer=rezero,size=micro")
  config.mixer.init = 0.5
  validate(config)

  mixer = registry.build(
    norm_eps=1e-5, num_sublayers=3, width=4, **config.mixer
  )
  assert isinstance(mixer.gates, base.DepthParam)
  embedding = jax.random.normal(jax.random.key(0), (2, 3, 4))
  h = base.run(mixer, embedding, [(jnp.sin, jnp.cos)] * 3)
  want = np.asarray(embedding, np.float64)
  for _ in range(3):
    want = want + 0.5 * np.cos(np.sin(want))
  np.testing.assert_allclose(h, want, atol=1e-5)  # float32, three sublayers
