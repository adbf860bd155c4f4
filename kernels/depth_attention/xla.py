"""The literal equations: the oracle of the tests."""


def attend(queries, sources, eps):
  raise NotImplementedError


def merge(query, attended, recent, update, norm_scale, options):
  raise NotImplementedError
