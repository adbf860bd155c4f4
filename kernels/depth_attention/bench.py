"""Times a block's depth mixing on this machine, beside plain JAX.

A block is what its sublayers read, and its sum: every one attends over R
finished sources and, from the second on, over the running sum of what the
sublayers before it returned; the mixtures are normed. The sublayers' outputs
are given arrays. Forward and backward: gradients of queries, scales, sources
and outputs.

  plain            as the paper's pseudo-code has it: stack, softmax, sum, norm
  plain_two_phase  the two-phase schedule in plain JAX
  xla              api.attend and api.merge with implementation="xla"
  pallas_tpu       the same with the kernels; only on a TPU
"""

import functools
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attnres_kernels.depth_attention import api

EPS = 1e-5
HIGHEST = jax.lax.Precision.HIGHEST


class Shape(NamedTuple):
  """A block: R sources, Q sublayers, width D, B * T tokens."""

  R: int
  Q: int
  D: int
  tokens: int
  dtype: str = "float32"


# The 436M model (8 blocks) at its middle and its end; widths trained on CPUs.
SHAPES = (
  Shape(5, 4, 1168, 2048),
  Shape(9, 4, 1168, 2048),
  Shape(9, 4, 1168, 2048, "bfloat16"),
  Shape(5, 4, 96, 2048),
  Shape(9, 4, 256, 2048),
)


def run(
  shapes: Sequence[Shape] | None = None,
  rounds: int = 9,
  resident: bool = False,
) -> list[dict]:
  """Times every implementation on every shape, interleaved.

  Args:
    shapes: what to time; None: SHAPES.
    rounds: timed rounds; a round runs each implementation twice in a row and
      times the second, so that none pays for what the one before it left.
    resident: also measures peak resident memory, each implementation in a
      process of its own.

  Returns:
    A dict per shape and implementation. `seconds` is a median;
    `time_ratio_to_plain` the median over rounds of the ratio within a round;
    `memory_ratio_to_plain` that of temporary and result bytes as compiled;
    `resident_ratio_to_plain` that of the growth of the process, or None.
  """
  rows = []
  for shape in SHAPES if shapes is None else shapes:
    inputs = make_inputs(shape)
    names = [n for n in BLOCKS if n != "pallas_tpu" or _platform() == "tpu"]
    programs = {name: compile_block(name, inputs) for name in names}
    times = {name: [] for name in names}
    for _ in range(rounds):
      for name, program in programs.items():
        jax.block_until_ready(program(*inputs))
        start = time.perf_counter()
        jax.block_until_ready(program(*inputs))
        times[name].append(time.perf_counter() - start)
    del inputs
    memory = {name: _compiled_bytes(p) for name, p in programs.items()}
    grown = {}
    if resident:
      grown = {name: _resident_bytes(name, shape) for name in names}
    for name in names:
      pairs = zip(times[name], times["plain"], strict=True)
      rows.append(
        dict(
          op="block_forward_backward",
          implementation=name,
          **shape._asdict(),
          time_ratio_to_plain=statistics.median(a / b for a, b in pairs),
          memory_ratio_to_plain=memory[name] / memory["plain"],
          resident_ratio_to_plain=(
            grown[name] / grown["plain"] if resident else None
          ),
          seconds=statistics.median(times[name]),
          memory_bytes=memory[name],
          resident_bytes=grown.get(name),
          rounds=rounds,
          hardware=_hardware(),
        )
      )
  return rows


class Parameters(NamedTuple):
  """Arrays [Q, D], float32, one row per sublayer."""

  queries: jax.Array
  scales: jax.Array
  norm_scales: jax.Array


def make_inputs(shape: Shape):
  """(Parameters, R sources, Q outputs of sublayers)."""
  keys = jax.random.split(jax.random.key(0), 5)
  rows = (shape.Q, shape.D)
  parameters = Parameters(
    jax.random.normal(keys[0], rows) / shape.D**0.5,
    1 + 0.1 * jax.random.normal(keys[1], rows),
    1 + 0.1 * jax.random.normal(keys[2], rows),
  )

  def values(key, count):
    size = (shape.tokens, shape.D)
    return tuple(
      jax.random.normal(k, size).astype(shape.dtype)
      for k in jax.random.split(key, count)
    )

  return parameters, values(keys[3], shape.R), values(keys[4], shape.Q)


def compile_block(name: str, inputs):
  """Compiled (parameters, sources, outputs) -> (loss, gradients)."""

  def loss(parameters, sources, outputs):
    # A probe of its own for every channel: no cotangent is a constant.
    probe = jnp.cos(jnp.arange(parameters.queries.shape[1], dtype=jnp.float32))
    results = BLOCKS[name](parameters, sources, outputs)
    return sum(jnp.sum(probe * jnp.square(_wide(h))) for h in results)

  graded = jax.value_and_grad(loss, argnums=(0, 1, 2))
  return jax.jit(graded).lower(*inputs).compile()


def plain(parameters, sources, outputs):
  """One softmax per sublayer over everything there is."""
  running, reads = None, []
  for row, output in zip(_rows(parameters), outputs, strict=True):
    query, scale, norm_scale = row
    parts = sources if running is None else (*sources, running)
    values = jnp.stack([_wide(v) for v in parts])
    keys = _rms_norm(values) * scale
    logits = jnp.einsum("d,rtd->rt", query, keys, precision=HIGHEST)
    weights = jax.nn.softmax(logits, axis=0)
    h = jnp.einsum("rt,rtd->td", weights, values)
    reads.append((_rms_norm(h) * norm_scale).astype(output.dtype))
    output = _wide(output)
    running = output if running is None else running + output
  return [*reads, running]


def plain_two_phase(parameters, sources, outputs):
  """The finished sources once for all queries, then online-softmax merges."""
  values = jnp.stack([_wide(v) for v in sources])
  query_QD = parameters.queries * parameters.scales
  logits = jnp.einsum(
    "qd,rtd->qrt", query_QD, _rms_norm(values), precision=HIGHEST
  )
  shift = jax.lax.stop_gradient(logits.max(1))
  weights = jnp.exp(logits - shift[:, None])
  sums = weights.sum(1)
  outs = jnp.einsum("qrt,rtd->qtd", weights, values)
  running, reads = None, []
  for l, output in enumerate(outputs):
    h, total = outs[l], sums[l]
    if running is not None:
      keys = _rms_norm(running)
      logit = jnp.einsum("d,td->t", query_QD[l], keys, precision=HIGHEST)
      top = jax.lax.stop_gradient(jnp.maximum(shift[l], logit))
      old, new = jnp.exp(shift[l] - top), jnp.exp(logit - top)
      h = old[:, None] * h + new[:, None] * running
      total = old * total + new
    h = h / total[:, None]
    h = _rms_norm(h) * parameters.norm_scales[l]
    reads.append(h.astype(output.dtype))
    output = _wide(output)
    running = output if running is None else running + output
  return [*reads, running]


def kernel(parameters, sources, outputs, implementation):
  """The op of this package."""
  kwargs = dict(eps=EPS, implementation=implementation)
  attended = api.attend(
    parameters.queries, sources, scales=parameters.scales, **kwargs
  )
  running, update, reads = (), None, []
  for row, finished, output in zip(
    _rows(parameters), attended, outputs, strict=True
  ):
    query, scale, norm_scale = row
    merged = api.merge(
      query, finished, running, update, scale=scale, norm_scale=norm_scale,
      norm_eps=EPS, **kwargs,
    )  # fmt: skip
    reads.append(merged.normed)
    if update is not None:
      running = (merged.total,)
    # The first output is the sum; later ones are added by the next merge.
    if not running:
      running = (_wide(output),)
    else:
      update = output
  last = running[0] if update is None else running[0] + _wide(update)
  return [*reads, last]


BLOCKS = {
  "plain": plain,
  "plain_two_phase": plain_two_phase,
  "xla": functools.partial(kernel, implementation="xla"),
  "pallas_tpu": functools.partial(kernel, implementation="pallas_tpu"),
}


def _rows(parameters):
  return zip(*parameters, strict=True)


def _rms_norm(v):
  return v * jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + EPS)


def _wide(v):
  return v.astype(jnp.float32)


def _compiled_bytes(program) -> int:
  stats = program.memory_analysis()
  return stats.temp_size_in_bytes + stats.output_size_in_bytes


def _resident_bytes(name: str, shape: Shape) -> int:
  """Growth of a fresh process's peak resident memory by running a block."""
  code = (
    "from attnres_kernels.depth_attention import bench;"
    f"print(bench._grown({name!r}, bench.Shape{tuple(shape)!r}))"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=False
  )
  if done.returncode:
    raise RuntimeError(f"measuring {name} failed:\n{done.stderr[-2000:]}")
  return int(done.stdout.split()[-1])


def _grown(name, shape) -> int:
  inputs = jax.block_until_ready(make_inputs(shape))
  program = compile_block(name, inputs)
  before = _peak_bytes()
  jax.block_until_ready(program(*inputs))
  return _peak_bytes() - before


def _peak_bytes() -> int:
  """Peak resident bytes of this process, on Linux.

  Not getrusage's: there a process inherits the peak of the one that started it.
  """
  with open("/proc/self/status") as f:
    (line,) = (line for line in f if line.startswith("VmHWM"))
  return 1024 * int(line.split()[1])


def _platform() -> str:
  return jax.default_backend()


def _hardware() -> str:
  if _platform() == "cpu":
    return f"cpu {_processor()}"
  return jax.devices()[0].device_kind


def _processor() -> str:
  """The processor's name where the system tells it."""
  try:
    with open("/proc/cpuinfo") as f:
      for line in f:
        if line.startswith("model name"):
          return line.split(":", 1)[1].strip()
  except OSError:
    pass
  return platform.processor() or platform.machine()
