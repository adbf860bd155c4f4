"""Errors of a run that started well."""

from attnres_jax.errors import UserError


class NonFiniteLossError(UserError):
  """The loss or the gradient norm became infinite or NaN.

  Attributes:
    step: the optimizer step, counted from 1, that it was found at.
  """

  def __init__(self, what: str, value: float, step: int, saved: int | None):
    self.step = step
    kept = "nothing was saved" if saved is None else f"step {saved} is saved"
    super().__init__(
      f"got {what} {value} at step {step}: expected a finite number; {kept}."
      " Set a lower --config.opt.lr or more --config.opt.warmup_steps, in a"
      " new --workdir."
    )
