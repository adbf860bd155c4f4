"""Every mechanism's equations, literally, in float64 NumPy.

Nothing here is imported from the package. A mechanism is a function
(options, parameters, embedding, sublayers) -> (h, weights): what the head sees,
and per sublayer (the output's aggregation last) the weights [R, B, T, H].
A sublayer is a function [B, T, D] -> [B, T, D] that contains its PreNorm.
"""

import itertools

import numpy as np

EPS = 1e-5


def rms_norm(v):
  return v / np.sqrt(np.mean(v * v, axis=-1, keepdims=True) + EPS)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def residual(options, parameters, embedding, sublayers):
  h, ones = embedding, np.ones((1, *embedding.shape[:2], 1))
  for f in sublayers:
    h = h + f(h)
  return h, [ones] * (len(sublayers) + 1)


def depth_weights(options, parameters, l, sources, current):
  """Weights [R, B, T, H] of query l."""
  heads = options.get("heads", 1)
  b, t, d = sources[0].shape
  logits = np.zeros((len(sources), b, t, heads))
  for i, v in enumerate(sources):
    if options.get("query", "static") == "none":
      logits[i] = parameters["query"]["scalars"][l][i]
      continue
    key = v
    if options.get("key_norm", True):
      key = rms_norm(v) * parameters["query"]["keys"]["scale"][l]
    if options.get("query", "static") == "static":
      w = np.broadcast_to(parameters["query"]["query"][l], v.shape)
    else:
      w = rms_norm(current) @ parameters["query"]["query"][l] / d
    logits[i] = (w * key).reshape(b, t, heads, d // heads).sum(-1)
  activation = options.get("activation", "softmax")
  if activation == "softmax":
    weights = np.exp(logits - logits.max(0))
    return weights / weights.sum(0)
  weights = sigmoid(logits)
  if activation == "normalised_sigmoid":
    weights = weights / weights.sum(0)
  return weights


def mixture(weights, sources):
  heads = weights.shape[-1]
  h = 0
  for w, v in zip(weights, sources, strict=True):
    h = h + np.repeat(w, v.shape[-1] // heads, axis=-1) * v
  return h


def attnres(options, parameters, embedding, sublayers, sources_of):
  """sources_of(outputs, l): what sublayer l reads, given outputs 0..l."""
  outputs, all_weights, previous = [embedding], [], embedding
  for l in range(len(sublayers) + 1):
    sources = sources_of(outputs, l)
    latest = options.get("query_input", "latest") == "latest"
    current = sources[-1] if latest else previous
    weights = depth_weights(options, parameters, l, sources, current)
    h = previous = mixture(weights, sources)
    all_weights.append(weights)
    if l < len(sublayers):
      outputs.append(sublayers[l](h))
  return h, all_weights


def full(options, parameters, embedding, sublayers):
  return attnres(
    options, parameters, embedding, sublayers, lambda v, l: list(v)
  )


def block(options, parameters, embedding, sublayers):
  size = options.get("block_size")
  if size is None:
    size = -(-len(sublayers) // options["num_blocks"])

  def sources_of(v, l):
    sources = [v[0]]
    done = 0
    while done < l:
      members = v[1 + done : 1 + min(done + size, l)]
      sources.append(sum(members[1:], members[0]))
      done += size
    return sources

  return attnres(options, parameters, embedding, sublayers, sources_of)


def sliding_window(options, parameters, embedding, sublayers):
  window = options.get("window", 8)

  def sources_of(v, l):
    return [v[0], *[v[i] for i in range(1, l + 1) if i > l - window]]

  return attnres(options, parameters, embedding, sublayers, sources_of)


def denseformer(options, parameters, embedding, sublayers):
  period, dilation = options.get("period", 1), options.get("dilation", 1)
  x, all_weights = [embedding], []
  for i in range(len(sublayers) + 1):
    if i > 0 and i % period == 0:
      picked = [j for j in range(i + 1) if j % dilation == i % dilation]
      row = parameters["scalars"][i]
      y = sum(a * x[j] for a, j in zip(row, picked, strict=True))
    else:
      row, y = np.ones(1), x[i]
    shape = (len(row), *embedding.shape[:2], 1)
    all_weights.append(np.broadcast_to(row.reshape(-1, 1, 1, 1), shape))
    if i < len(sublayers):
      x.append(y + sublayers[i](y))
  return y, all_weights


def sinkhorn(matrix, steps=20):
  for _ in range(steps):
    matrix = matrix / matrix.sum(-2, keepdims=True)  # columns first
    matrix = matrix / matrix.sum(-1, keepdims=True)  # then rows
  return matrix


def hyper(options, parameters, embedding, sublayers, residual_of):
  m = options.get("streams", 4)
  x = np.repeat(embedding[:, :, None], m, axis=2)  # [B, T, M, D]
  all_weights = []
  for l, f in enumerate(sublayers):
    flat = rms_norm(x.reshape(*x.shape[:2], -1))
    z = flat @ parameters["projection"][l]
    gate, bias = parameters["gates"][l], parameters["bias"][l]
    pre = sigmoid(gate[0] * z[..., :m] + bias[:m])
    post = 2 * sigmoid(gate[1] * z[..., m : 2 * m] + bias[m : 2 * m])
    res = residual_of(gate[2] * z[..., 2 * m :] + bias[2 * m :], m)
    all_weights.append(np.moveaxis(pre, -1, 0)[..., None])
    y = f(np.einsum("btm,btmd->btd", pre, x))
    x = np.einsum("btij,btjd->btid", res, x) + post[..., None] * y[:, :, None]
  all_weights.append(np.ones((m, *embedding.shape[:2], 1)))
  return x.sum(2), all_weights


def mhc(options, parameters, embedding, sublayers):
  def residual_of(logits, m):
    return sinkhorn(np.exp(logits).reshape(*logits.shape[:-1], m, m))

  return hyper(options, parameters, embedding, sublayers, residual_of)


def mhc_lite(options, parameters, embedding, sublayers):
  def residual_of(logits, m):
    a = np.exp(logits - logits.max(-1, keepdims=True))
    a = a / a.sum(-1, keepdims=True)
    matrix = 0
    for k, order in enumerate(itertools.permutations(range(m))):
      permutation = np.zeros((m, m))
      for row, column in enumerate(order):
        permutation[row, column] = 1
      matrix = matrix + a[..., k, None, None] * permutation
    return matrix

  return hyper(options, parameters, embedding, sublayers, residual_of)


ORACLES = {
  "residual": residual,
  "full": full,
  "block": block,
  "sliding_window": sliding_window,
  "denseformer": denseformer,
  "mhc": mhc,
  "mhc_lite": mhc_lite,
}
