"""Phase 2 (`merge`) as TPU kernels."""


def merge(query, attended, recent, update, norm_scale, options):
  raise NotImplementedError
