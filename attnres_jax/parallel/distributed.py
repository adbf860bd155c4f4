"""One program on several processes: how they start and how they agree.

On Cloud TPU every process finds the others by itself; anywhere else they are
told by flags. A single host is left alone. After `join`, what one process
finds out (an error, a file's content) reaches the others through `together`
and `from_first`, so that they go on or end as one.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from attnres_jax.errors import UserError
from attnres_jax.parallel import roll_call

DEFAULT_TIMEOUT_S = 300
ERROR_BYTES = 2048  # of a message that `together` passes on


@dataclasses.dataclass(frozen=True)
class Cluster:
  """The processes of a run.

  Attributes:
    host, port: of process 0.
    num_processes: at least 2.
    process_id: this one, from 0.
  """

  host: str
  port: int
  num_processes: int
  process_id: int


def join(
  coordinator: str | None,
  num_processes: int | None,
  process_id: int | None,
  timeout_s: int,
  facts: Mapping[str, str],
) -> bool:
  """Joins the other processes, if there are any. Before the first use of JAX.

  Args:
    coordinator: host:port of process 0; None on Cloud TPU and alone.
    num_processes: how many there are; None likewise.
    process_id: this one, from 0; None likewise.
    timeout_s: seconds to wait for the others.
    facts: what has to be the same everywhere, such as the code's version.

  Returns:
    Whether there are others.

  Raises:
    UserError: the flags do not fit together; a process did not come in time;
      they disagree in `facts`. Nothing has been done.
  """
  if timeout_s < 1:
    raise UserError(
      f"got --init_timeout={timeout_s}: expected at least 1 second. Set it."
    )
  given = dict(
    coordinator=coordinator, num_processes=num_processes, process_id=process_id
  )
  if all(value is None for value in given.values()):
    cluster = _cloud_tpu(timeout_s)
  else:
    cluster = _of_flags(given)
  if cluster is None:
    return False
  roll_call.hold(
    cluster.host, cluster.port, cluster.num_processes, cluster.process_id,
    timeout_s, facts,
  )  # fmt: skip
  # It would swallow SIGTERM; the training loop has its own way to stop.
  jax.config.update("jax_enable_preemption_service", False)
  jax.distributed.initialize(
    f"{_bracketed(cluster.host)}:{cluster.port}",
    cluster.num_processes,
    cluster.process_id,
    cluster_detection_method="deactivate",
    initialization_timeout=timeout_s,
  )
  return True


def _of_flags(given: Mapping[str, Any]) -> Cluster | None:
  """The cluster that flags describe; None for a single process."""
  missing = [f"--{key}" for key, value in given.items() if value is None]
  if missing:
    there = [f"--{k}={v}" for k, v in given.items() if v is not None]
    raise UserError(
      f"got {' '.join(there)} without {' and '.join(missing)}: expected all of"
      " --coordinator=HOST:PORT, --num_processes and --process_id, or none of"
      " them (alone, or on Cloud TPU)."
    )
  address, count = given["coordinator"], given["num_processes"]
  match = re.fullmatch(r"\[([0-9a-fA-F:.]+)\]:(\d+)|([^:\s/]+):(\d+)", address)
  port = int(match[2] or match[4]) if match else 0
  if not 0 < port < 1 << 16:
    raise UserError(
      f"got --coordinator={address}: expected HOST:PORT of process 0, such as"
      " 10.0.0.2:8476. Set it, the same for all processes."
    )
  if count < 1:
    raise UserError(
      f"got --num_processes={count}: expected at least 1. Set it."
    )
  if not 0 <= given["process_id"] < count:
    raise UserError(
      f"got --process_id={given['process_id']}: expected 0 to {count - 1}, as"
      f" --num_processes is {count}. Set it, another for each process."
    )
  if count == 1:
    return None
  return Cluster(match[1] or match[3], port, count, given["process_id"])


def _cloud_tpu(timeout_s: int) -> Cluster | None:
  """What Cloud TPU says about this job; None if it is not one of many hosts."""
  platforms = jax.config.jax_platforms
  if platforms and "tpu" not in platforms.split(","):
    return None
  # JAX has no public way to ask without joining, and joining ends the process
  # where another one never comes.
  from jax._src import hardware_utils
  from jax._src.clusters import GceTpuCluster, GkeTpuCluster

  if not hardware_utils.num_available_tpu_chips_and_device_id()[0]:
    return None  # without asking a metadata server that is not there
  try:
    for kind in (GkeTpuCluster, GceTpuCluster):
      if kind.is_env_present():
        count = kind.get_process_count()
        if count == 1:
          return None
        address = kind.get_coordinator_address(timeout_s, None)
        host, _, port = address.rpartition(":")
        return Cluster(host, int(port), count, kind.get_process_id())
  except Exception as error:  # of `requests`, or what is missing
    raise UserError(
      f"cannot find the other hosts of this TPU slice ({error}): expected"
      " Cloud TPU's metadata server, or TPU_WORKER_HOSTNAMES and TPU_WORKER_ID"
      " in the environment. Set --coordinator, --num_processes and"
      " --process_id; --num_processes=1 for this host alone."
    ) from None
  return None


def _bracketed(host: str) -> str:
  return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def together(doing: str) -> Iterator[None]:
  """A UserError on one process becomes one on all of them.

  Else the others would wait for that one until a time-out ends them. All
  processes have to come here.

  Args:
    doing: what is done inside, for the message.
  """
  problem = None
  try:
    yield
  except UserError as error:
    problem = error
  if jax.process_count() > 1:
    text = str(problem or "").encode()[:ERROR_BYTES]
    row = np.zeros(ERROR_BYTES, np.uint8)
    row[: len(text)] = np.frombuffer(text, np.uint8)
    rows = multihost_utils.process_allgather(row)
    for i, row in enumerate(rows):
      if row.any() and problem is None:
        theirs = bytes(row).rstrip(b"\0").decode(errors="replace")
        problem = UserError(f"process {i}, {doing}: {theirs}")
  if problem is not None:
    raise problem


def from_first(value: Any) -> Any:
  """The JSON value that process 0 calls this with, on all processes.

  They see a shared folder at slightly different times; only one may decide.
  """
  if jax.process_count() == 1:
    return value
  text = np.frombuffer(json.dumps(value).encode(), np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
  row = np.zeros(size, np.uint8)
  row[: len(text)] = text[:size]
  return json.loads(bytes(multihost_utils.broadcast_one_to_all(row)))


@dataclasses.dataclass(frozen=True)
class RowShard:
  """Which rows of every global batch a process has to load.

  Attributes:
    rows: their numbers, ascending.
    index: of this part among all parts, from 0. Processes whose devices hold
      the same rows (tensor parallelism across hosts) have the same index.
    count: parts.
  """

  rows: tuple[int, ...]
  index: int
  count: int


def row_shard(sharding: Sharding, batch_size: int) -> RowShard:
  """The rows that the devices of this process hold.

  Whatever the order of the devices in the mesh is, the global batch is the
  same: row r of it is always that of the data set's r-th sequence.

  Args:
    sharding: of a batch's arrays.
    batch_size: B, of all processes together.

  Raises:
    UserError: two processes share some of their rows but not all.
  """
  rows: dict[int, set[int]] = {}
  for device, (index, *_) in sharding.devices_indices_map(
    (batch_size, sharding.mesh.size)
  ).items():
    held = range(batch_size)[index]
    rows.setdefault(device.process_index, set()).update(held)
  parts = sorted({tuple(sorted(held)) for held in rows.values()})
  if sum(map(len, parts)) != batch_size:
    raise UserError(
      f"got a mesh in which {len(rows)} processes share the {batch_size} rows"
      " of a batch unevenly: expected the devices of a process to hold whole"
      " parts of it. Set --config.mesh.data or --config.data.batch_size."
    )
  mine = tuple(sorted(rows[jax.process_index()]))
  return RowShard(mine, parts.index(mine), len(parts))
