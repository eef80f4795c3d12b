"""What do the PyTorch peers of the tiled softmax cost on this GPU, where they are installed?"""

import importlib.metadata
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from experiments.bench.losses import Shape

PACKAGES = ("torch", "triton", "cut-cross-entropy", "liger-kernel")


class Cost(NamedTuple):
  """What loss and gradient cost.

  Attributes:
    seconds: median time of a call.
    compiled_bytes: peak of memory that the compiler plans; None where nothing plans it.
    device_bytes: peak of memory that the device counted; None where it does not count.
  """

  seconds: float
  compiled_bytes: int | None
  device_bytes: int | None


def versions() -> dict[str, str]:
  """Those of the peers that are installed."""
  found = {}
  for name in PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


def cut_cross_entropy(shape: Shape, calls: int, filter_eps: str | None) -> Cost:
  """Apple's `linear_cross_entropy`; `filter_eps` as it takes it.

  Its default, "high", skips gradients of small probabilities: on random scores over a large
  vocabulary all are small, and nearly nothing is left to compute. None skips nothing.
  """
  from cut_cross_entropy import linear_cross_entropy

  loss = lambda hidden, weight, t: linear_cross_entropy(hidden, weight, t, filter_eps=filter_eps)
  return _cost(shape, calls, loss)


def liger(shape: Shape, calls: int) -> Cost:
  """Liger's fused linear cross-entropy, which computes the gradient in its forward pass."""
  from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

  loss = LigerFusedLinearCrossEntropyLoss()
  return _cost(shape, calls, lambda hidden, weight, t: loss(weight, hidden, t))


def _cost(shape: Shape, calls: int, loss: Callable) -> Cost:
  import torch

  if not torch.cuda.is_available():
    raise RuntimeError("torch sees no CUDA device")
  make = lambda *dims: torch.randn(*dims, device="cuda", dtype=torch.bfloat16)
  hidden, weight = make(shape.tokens, shape.dim), make(shape.vocab, shape.dim)
  weight.mul_(shape.dim**-0.5)
  tokens = torch.randint(shape.vocab, (shape.tokens,), device="cuda")
  hidden.requires_grad_()
  weight.requires_grad_()
  torch.cuda.reset_peak_memory_stats()
  times = []
  # The first calls compile and choose among kernels.
  for _ in range(3 + calls):
    start = time.perf_counter()
    torch.autograd.grad(loss(hidden, weight, tokens), (hidden, weight))
    torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
  return Cost(statistics.median(times[3:]), None, torch.cuda.max_memory_allocated())
