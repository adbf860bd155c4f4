"""Compiles the program of a config for a slice of TPUs, which need not be here.

The real TPU compiler says whether the program fits and what it exchanges;
hlo_cost.py counts what it moves and multiplies; roofline.py models its time.
Every program is compiled in a process of its own: the compiler reads its
environment once, keeps its memory, and ends the process when it fails badly.
"""

import datetime
import itertools
import json
import math
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from attnres_jax import provenance
from attnres_jax.analysis import fits, hlo, hlo_cost, results, roofline
from attnres_jax.config import validate
from attnres_jax.depth_mixing import registry
from attnres_jax.errors import UserError, unknown_name
from attnres_kernels.depth_attention import static

BASELINE = "residual"
PROGRAMS = ("train", "prefill")
MEASURED = "modelled from the compiled program (static)"

# What a reader may rely on; rows hold more.
REQUIRED_KEYS = (
  "config", "program", "topology", "mesh", "mixer", "fits", "argument_bytes",
  "temp_bytes", "hbm_bytes", "flops", "collectives", "compile_s",
  "modelled_step_s", "ratio_to_baseline", "versions",
)  # fmt: skip


class Job(NamedTuple):
  """A program to compile.

  Attributes:
    label: what the user calls the config, without its mixer.
    config: of configs/train.py, as nested dicts of plain values.
    program: of PROGRAMS.
    topology: e.g. v5p:4x4x4.
    top: how many of the costliest operations to list.
  """

  label: str
  config: dict[str, Any]
  program: str
  topology: str
  top: int = 0

  @property
  def mixer(self) -> str:
    return self.config["mixer"]["name"]

  @property
  def key(self) -> str:
    """Tells rows apart, whatever the commit."""
    mesh = ",".join(f"{k}={v}" for k, v in self.config["mesh"].items())
    hashed = results.config_hash(self.config)
    return "/".join((self.program, self.topology, mesh, self.mixer, hashed))


def jobs(
  label: str,
  config: ConfigDict,
  program: str,
  topology: str,
  mixers: Iterable[str] = (),
  top: int = 0,
) -> list[Job]:
  """The baseline and the mixers of one config, for one slice.

  Args:
    label: what the user calls the config.
    config: of configs/train.py; its own mixer keeps its options.
    program: of PROGRAMS.
    topology: of a slice.
    mixers: names; none: the config's own.
    top: how many of the costliest operations a row lists.

  Raises:
    UserError: a name, the config, its mesh or the topology is wrong.
  """
  if program not in PROGRAMS:
    raise unknown_name("program", program, PROGRAMS, "--program")
  chips = check_topology(topology)
  check_filled(config.mesh.to_dict(), chips, topology)
  found = {}
  for name in (BASELINE, *(mixers or (config.mixer.name,))):
    own = ConfigDict(config.copy_and_resolve_references())
    if name != config.mixer.name:
      options = registry.default_options(name)
      own.mixer = ConfigDict(dict(name=name, **options))
    validate(own)
    found[name] = Job(label, _plain(own), program, topology, top)
  return list(found.values())


def check_topology(topology: str) -> int:
  """Chips of a slice.

  Raises:
    UserError: there is no such slice; lists some that exist.
  """
  match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", topology)
  chip = roofline.CHIPS.get(match.group(1)) if match else None
  if chip is None:
    examples = [
      f"{name}:{shape}"
      for name, known in roofline.CHIPS.items()
      for shape in known.examples
    ]
    raise unknown_name("topology", topology, examples, "--topology")
  sizes = [int(n) for n in match.group(2).split("x")]
  chips = math.prod(sizes)
  if len(sizes) != chip.axes or not 1 < chips <= chip.pod:
    raise _no_slice(topology)
  return chips


def _no_slice(topology: str) -> UserError:
  name = topology.split(":")[0]
  chip = roofline.CHIPS[name]
  return UserError(
    f"got topology {topology}: expected a slice that exists,"
    f" {chip.axes} sizes and at most {chip.pod} chips, such as "
    + ", ".join(f"{name}:{shape}" for shape in chip.examples)
    + ". Set it with --topology."
  )


def parse_mesh(text: str, known: Iterable[str]) -> dict[str, int]:
  """`data=32,tensor=2` -> {"data": 32, "tensor": 2}.

  Raises:
    UserError: not of that form, or no such axis.
  """
  mesh = {}
  for item in text.split(","):
    axis, _, size = item.partition("=")
    if axis not in known:
      raise unknown_name("mesh axis", axis, known, "--mesh=AXIS=SIZE,...")
    if not re.fullmatch(r"-1|\d+", size):
      raise UserError(
        f"got --mesh item {item!r}: expected AXIS=SIZE with an integer, such"
        " as --mesh=data=32."
      )
    mesh[axis] = int(size)
  return mesh


def check_filled(mesh: dict[str, int], devices: int, topology: str) -> None:
  """A whole slice is paid for.

  Raises:
    UserError: the mesh leaves devices of the slice idle, or has too many.
  """
  sizes = list(mesh.values())
  if -1 in sizes:
    return
  if math.prod(sizes) not in (devices, 2 * devices):  # v4: two per chip
    shown = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    raise UserError(
      f"got a mesh {shown} of {math.prod(sizes)} devices: expected"
      f" {devices}, those of {topology}. Set it with --mesh; -1 stands for"
      " all the others."
    )


def run(
  todo: Iterable[Job], path: pathlib.Path | None = None
) -> Iterator[dict[str, Any]]:
  """Compiles jobs one after the other, the baseline first; yields their rows.

  Args:
    todo: of `jobs`.
    path: a result file. Rows are appended to it, and what it has already is
      not compiled again.

  Raises:
    UserError: the slice does not exist, or the mesh does not divide the model.
    RuntimeError: the compiler failed; carries what it wrote.
  """
  there = {}
  if path is not None:
    for row in results.read(path, REQUIRED_KEYS):
      there[row["key"]] = row
  baseline = None
  for job in todo:
    row = there.get(job.key)
    if row is None:
      row = _row(job, _in_a_process(job), baseline)
      if path is not None:
        results.append(path, row)
    if job.mixer == BASELINE:
      baseline = row
    yield row


def _row(job: Job, found: dict, baseline: dict | None) -> dict[str, Any]:
  row = dict(
    config=job.label,
    program=job.program,
    topology=job.topology,
    mesh=job.config["mesh"],
    mixer=job.mixer,
  )
  row |= found

  def ratio(key):
    base = row if baseline is None else baseline
    if not row[key] or not base[key]:
      return None
    return round(row[key] / base[key], 4)

  def excess(key):
    base = row if baseline is None else baseline
    if row[key] is None or base[key] is None:
      return None
    return row[key] - base[key]

  row |= dict(
    temp_bytes_over_baseline=excess("temp_bytes"),
    ratio_to_baseline=ratio("modelled_step_s"),
    bound_ratio_to_baseline=ratio("bound_s"),
    measured=MEASURED,
    versions=versions(),
    commit=provenance.commit(),
    date=datetime.date.today().isoformat(),
    config_hash=results.config_hash(job.config),
    key=job.key,
  )
  return row


def versions() -> dict[str, str | None]:
  """Of what makes the program."""
  found = {
    name: provenance.versions()[name]
    for name in ("attnres_jax", "jax", "jaxlib", "flax")
  }
  return found | dict(libtpu=static.compiler_version())


def _in_a_process(job: Job) -> dict[str, Any]:
  try:
    environment = static.compiler_environment()
  except RuntimeError as error:
    raise UserError(str(error)) from error
  done = subprocess.run(
    [sys.executable, "-m", __spec__.name],
    input=json.dumps(job),
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    raise RuntimeError(
      f"{job.mixer} did not compile for {job.topology}:\n" + done.stderr[-4000:]
    )
  answer = json.loads(done.stdout.splitlines()[-1])
  if "user_error" in answer:
    raise UserError(answer["user_error"])
  return answer


def compile_job(job: Job) -> dict[str, Any]:
  """Compiles in this process, and says what the program is like.

  Raises:
    UserError: the slice does not exist, or the mesh does not divide the model.
  """
  import jax
  from jax.experimental import topologies

  from attnres_jax.parallel.mesh import make_mesh

  try:
    devices = topologies.get_topology_desc(
      topology_name=job.topology, platform="tpu"
    ).devices
  except jax.errors.JaxRuntimeError as error:
    if "INVALID_ARGUMENT" not in str(error):
      raise
    raise _no_slice(job.topology) from error
  config = ConfigDict(job.config)
  mesh = make_mesh(config, devices)
  if mesh.size != len(devices):
    check_filled(dict(mesh.shape), len(devices), job.topology)
  start = time.perf_counter()
  lowered, params, opt_state = _lower(job.program, config, mesh)
  chip = roofline.CHIPS[job.topology.split(":")[0]]
  cores = 1 + max(device.core_on_chip for device in devices)
  row = dict(
    mesh=dict(mesh.shape.items()),
    fits=True,
    reason=None,
    parameter_bytes=fits.shard_bytes(params),
    optimizer_bytes=fits.shard_bytes(opt_state),
    hbm_limit_bytes=chip.hbm // cores - roofline.RESERVED,
  )
  numbers = (
    "argument_bytes", "temp_bytes", "output_bytes", "alias_bytes",
    "peak_bytes", "hbm_bytes", "flops", "collectives", "kernels",
    "sources", "source_bytes", "modelled_step_s", "modelled_s_by_bound",
    "bound_s", "loops_counted_once",
  )  # fmt: skip
  row |= dict.fromkeys(numbers)
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error) or "vmem" in str(error):
      raise
    row |= dict(fits=False, reason=fits.refused(str(error), row, config))
    return row | dict(compile_s=round(time.perf_counter() - start, 1))
  row["compile_s"] = round(time.perf_counter() - start, 1)
  row |= fits.memory(compiled)
  if row["peak_bytes"] > row["hbm_limit_bytes"]:
    row |= dict(fits=False, reason=fits.explain(row["peak_bytes"], row, config))

  text = compiled.as_text()
  program = hlo.parse(text)
  counted = hlo_cost.count(program)
  at = [device.coords for device in mesh.devices.flat]

  def axes_spanned(group):
    places = [at[i] for i in group]
    return sum(len(set(axis)) > 1 for axis in zip(*places, strict=True))

  modelled = roofline.model(counted, chip, axes_spanned, cores)
  row |= dict(
    hbm_bytes=round(counted.hbm_bytes),
    flops=round(counted.flops),
    collectives=counted.collectives(),
    kernels=text.count('custom_call_target="tpu_custom_call"'),
    **_sources(program),
    modelled_step_s=_digits(modelled.seconds),
    modelled_s_by_bound={
      bound: _digits(seconds) for bound, seconds in modelled.by_bound().items()
    },
    bound_s=_digits(modelled.bound_s),
    loops_counted_once=counted.loops_counted_once,
  )
  if job.top:
    row["top"] = top_operations(modelled.parts, job.top)
  return row


def _lower(program: str, config: ConfigDict, mesh):
  """(the lowered program, its abstract parameters and optimizer state)."""
  from attnres_jax.infer.prefill import lower_prefill
  from attnres_jax.train.program import lower_program

  if program == "prefill":
    return *lower_prefill(config, mesh), ()
  lowered = lower_program(config, mesh)
  state = lowered.abstract_state
  return lowered.train_step, state.params, state.opt_state


def _sources(program: hlo.Program) -> dict[str, int | None]:
  """Depth sources that a device keeps, as the kernel at the output reads them:
  how many, and the bytes of one, both None where no kernel reads any."""
  most = (0, 0)
  for computation in program.computations.values():
    for x in computation:
      if x.opcode == "custom-call" and "attnres_attend_forward" in x.name:
        sources = x.operands[1:]  # behind the queries
        one = computation.instructions[sources[0]].arrays[0]
        unpadded = one.elements * hlo.BITS[one.dtype] // 8
        most = max(most, (len(sources), unpadded))
  return dict(sources=most[0] or None, source_bytes=most[1] or None)


def top_operations(parts: list[roofline.Part], n: int) -> list[dict]:
  """Those that take most of the modelled time, alike ones together."""

  def name(part):
    source = part.cost.instruction.attribute(r'op_name="([^"]*)"')
    if source is None:
      source = re.sub(r"[.\d]+$", "", part.cost.instruction.name)
    return part.bound, source.partition(")/")[2] or source

  groups = [
    dict(
      seconds=_digits(sum(part.seconds for part in same)),
      bound=key[0],
      operation=key[1],
      instructions=len(same),
    )
    for key, same in (
      (key, list(group))
      for key, group in itertools.groupby(sorted(parts, key=name), name)
    )
  ]
  return sorted(groups, key=lambda group: -group["seconds"])[:n]


def _plain(config: ConfigDict) -> dict[str, Any]:
  return json.loads(json.dumps(config.to_dict()))


def _digits(value: float) -> float:
  return float(f"{value:.6g}")


if __name__ == "__main__":
  try:
    _answer = compile_job(Job(*json.load(sys.stdin)))
  except UserError as _error:
    _answer = dict(user_error=str(_error))
  print(json.dumps(_answer))
