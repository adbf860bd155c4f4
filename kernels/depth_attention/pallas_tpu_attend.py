"""Phase 1 (`attend`) as TPU kernels."""


def attend(queries, sources, eps):
  raise NotImplementedError
