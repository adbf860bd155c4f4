"""All processes meet once, compare what they are about to run, and go on.

`jax.distributed` ends the whole process with a stack dump when another one
never comes, and has nothing to say of two that run different code. So they
meet here first, over plain TCP on the coordinator's own port, which is free
again before JAX takes it. No JAX in this file.

Process 0 listens. Every other one sends a line of JSON (who it is, how many it
expects, its facts) and waits for one line back: go on, or what is wrong.
"""

import contextlib
import errno
import json
import select
import socket
import time
from collections.abc import Mapping

from attnres_jax.errors import UserError

HELLO = "attnres_jax roll call"  # tells ours from whatever else connects
RETRY_S = 0.2  # between two tries to reach process 0
# A process that came in time hears of the others' fate this much later at
# most, process 0 having started its clock last.
ANSWER_S = 5.0
MAX_BYTES = 1 << 20  # of one message
MAX_DIFFERENCES = 4  # that a message names

Facts = Mapping[str, str]


def hold(
  host: str,
  port: int,
  num_processes: int,
  process_id: int,
  timeout_s: float,
  facts: Facts,
) -> None:
  """Returns on every process once all are there and agree.

  Args:
    host, port: where process 0 listens; the port on all its addresses.
    num_processes: how many there must be.
    process_id: this one, from 0.
    timeout_s: seconds to wait for the others.
    facts: what has to be the same on all of them; names are shown to people.

  Raises:
    UserError: on all that are there: who did not come in time, who differs in
      what, which process number is there twice.
  """
  hello = dict(
    hello=HELLO, processes=num_processes, process=process_id, facts=dict(facts)
  )
  if process_id:
    _attend(host, port, hello, timeout_s)
  else:
    _preside(port, hello, timeout_s)


def _preside(port: int, hello: dict, timeout_s: float) -> None:
  """Process 0: waits for all, judges, tells everybody."""
  deadline = time.monotonic() + timeout_s
  with contextlib.ExitStack() as stack:
    listener = stack.enter_context(_listen(port))
    there: dict[int, tuple[socket.socket, dict]] = {}
    buffers: dict[socket.socket, bytes] = {}
    problem = None
    while problem is None and len(there) < hello["processes"] - 1:
      left = deadline - time.monotonic()
      # Readable without a message of its own: it gave up, or was killed.
      waiting = [listener, *buffers, *(s for s, _ in there.values())]
      ready = select.select(waiting, [], [], max(left, 0))[0]
      if not ready and left <= 0:
        problem = _absent(hello["processes"], there, timeout_s)
      for sock in ready:
        if sock is listener:
          joined, _ = listener.accept()
          buffers[stack.enter_context(joined)] = b""
        elif sock in buffers:
          received = _receive(sock)
          text = buffers[sock] = buffers[sock] + received
          whole = text.endswith(b"\n")
          if not received or whole or len(text) > MAX_BYTES:
            del buffers[sock]
            other = _parse(text) if whole else None
            if other is None:  # a stranger, such as a port scanner
              sock.close()
              continue
            problem = problem or _register(there, sock, other, hello)
        else:
          gone = [i for i, (s, _) in there.items() if s is sock]
          there.pop(gone[0], None)
          sock.close()
    problem = problem or _disagreement(
      {0: hello, **{i: other for i, (_, other) in there.items()}}
    )
    for sock, _ in there.values():
      with contextlib.suppress(OSError):
        sock.sendall(json.dumps({"problem": problem}).encode() + b"\n")
  if problem:
    raise UserError(problem)


def _attend(host: str, port: int, hello: dict, timeout_s: float) -> None:
  """Any other process: reports to process 0 and hears what it says."""
  deadline = time.monotonic() + timeout_s
  where = f"{host}:{port}"
  reason: Exception | None = None
  while (left := deadline - time.monotonic()) > 0:
    try:
      with socket.create_connection((host, port), timeout=left) as sock:
        sock.sendall(json.dumps(hello).encode() + b"\n")
        sock.settimeout(timeout_s + ANSWER_S)
        text = b""
        while not text.endswith(b"\n") and (received := _receive(sock)):
          text += received
        answer = _parse(text, key="problem")
        if answer is not None:
          if answer["problem"]:
            raise UserError(answer["problem"])
          return
        reason = ConnectionError("it hung up without an answer")
    except OSError as error:  # not there yet, or not resolvable yet
      reason = error
    time.sleep(min(RETRY_S, max(deadline - time.monotonic(), 0)))
  raise UserError(
    f"process {hello['process']} of {hello['processes']} did not reach process"
    f" 0 at {where} within {timeout_s:g} s ({reason}): expected process 0 to"
    " listen there. See whether it runs and the port is open; --coordinator"
    " sets the address, --init_timeout the seconds."
  )


def _listen(port: int) -> socket.socket:
  try:
    if socket.has_dualstack_ipv6():
      return socket.create_server(
        ("", port), family=socket.AF_INET6, dualstack_ipv6=True
      )
    return socket.create_server(("", port))
  except OSError as error:
    in_use = error.errno == errno.EADDRINUSE
    raise UserError(
      f"process 0 got port {port} of --coordinator, on which it cannot listen"
      f" ({error.strerror}): expected a free one."
      + (" Another run may be using it." if in_use else "")
      + " Set another port, the same for all processes."
    ) from None


def _receive(sock: socket.socket) -> bytes:
  try:
    return sock.recv(1 << 16)
  except ConnectionError:
    return b""


def _parse(text: bytes, key: str = "hello") -> dict | None:
  """A message that has `key`; None for anything else."""
  try:
    message = json.loads(text)
  except ValueError:
    return None
  if not isinstance(message, dict) or key not in message:
    return None
  return message if message.get("hello", HELLO) == HELLO else None


def _register(there: dict, sock, other: dict, mine: dict) -> str | None:
  """Adds a process; returns what is wrong with it, if anything is."""
  i, problem = other["process"], None
  if other["processes"] != mine["processes"]:
    problem = (
      f"process {i} got --num_processes={other['processes']} and process 0"
      f" --num_processes={mine['processes']}: expected the same everywhere."
      " Set it."
    )
  elif not 0 < i < mine["processes"] or i in there:
    problem = (
      f"got two processes that say they are process {i}: expected each of 0 to"
      f" {mine['processes'] - 1} once. Set --process_id."
    )
  there[i if problem is None else -1] = sock, other
  return problem


def _absent(expected: int, there: dict, timeout_s: float) -> str:
  missing = [i for i in range(1, expected) if i not in there]
  shown = ", ".join(map(str, missing[:8])) + ", ..." * (len(missing) > 8)
  plural = "es" * (len(missing) > 1)
  return (
    f"{len(there) + 1} of {expected} processes came within {timeout_s:g} s,"
    f" process{plural} {shown} did not: expected all. See whether"
    f" {'they run' if plural else 'it runs'} and can reach process 0;"
    " --coordinator, --num_processes and --process_id say who there is,"
    " --init_timeout how many seconds to wait."
  )


def _disagreement(hellos: Mapping[int, dict]) -> str | None:
  """Who differs from process 0 in what; None if all are the same."""
  first = hellos[0]["facts"]
  different = []  # (fact, its value on process 0, {other value: processes})
  for name in sorted({key for h in hellos.values() for key in h["facts"]}):
    values: dict[str, list[int]] = {}
    for i, hello in sorted(hellos.items()):
      values.setdefault(hello["facts"].get(name, "missing"), []).append(i)
    mine = first.get(name, "missing")
    if others := {v: who for v, who in values.items() if v != mine}:
      different.append((name, mine, others))
  if not different:
    return None
  texts = []
  for name, mine, others in different[:MAX_DIFFERENCES]:
    theirs = ", ".join(
      f"{value} on process{'es' * (len(who) > 1)} {_numbers(who)}"
      for value, who in others.items()
    )
    texts.append(f"{name} is {mine} on process 0 and {theirs}")
  more = len(different) - MAX_DIFFERENCES
  return (
    f"the processes disagree: {'; '.join(texts)}"
    f"{f'; and {more} more' * (more > 0)}: expected the same everywhere. Start"
    " all of them with the same flags, on the same commit, in equal"
    " environments."
  )


def _numbers(who: list[int]) -> str:
  return ", ".join(map(str, who[:8])) + ", ..." * (len(who) > 8)
