"""The letter key of every shape, and the paper's symbols in this code.

Letters (upper case in einsum strings, jaxtyping and suffixes such as `h_BTD`):

  B  batch                          L  sublayers (attention and MLP each count)
  T  tokens (query side)            R  depth sources that are read
  S  tokens (key side)              Q  pseudo-queries that are read together
  D  width                          M  streams of a multi-stream residual
  F  hidden channels of the MLP     W  depth window, in sublayer outputs
  V  vocabulary                     E  experts
  N  query heads                    K  key/value heads
  H  head dim; in depth mixing: heads of the depth attention

Depth is counted in sublayers everywhere. Sublayers are numbered from 0; the
*outputs* are numbered as in the paper: output 0 is the token embedding and
output i is what sublayer i - 1 returned, so sublayer l may read outputs 0..l,
and "sublayer L" is the aggregation before the head.
"""

# Paper symbol -> where it is in this code.
PAPER_SYMBOLS = {
  "l": "sublayer index + 1 (the paper counts layers from 1)",
  "L": "num_sublayers",
  "L_b": "model.layers (Transformer blocks, two sublayers each)",
  "N": "number of depth blocks, ceil(L / S)",
  "S": "block_size, in sublayers",
  "d": "width (D)",
  "w_l": "StaticQuery.query[l - 1]",
  "v_i": "source i of Full: output i",
  "k_i": "RMSNorm(v_i) * key scale, never stored",
  "b_n": "finished source n of Block: a sum of S outputs",
  "b_n^i": "DepthState.recent[0] of Block: the running sum of its block",
  "phi": "activation: exp (softmax) or sigmoid of the logit",
  "H_l": "HyperState.streams (B T M D)",
  "m": "streams (M)",
}
