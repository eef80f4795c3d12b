"""Model FLOPs of a training token, and the share of the devices' peak that a run reaches."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from vqjax.lab import chips
from vqjax.lm.models import LanguageModel, Transformer

__all__ = ["Throughput", "flops_per_token"]


def flops_per_token(model: Any, params: Any) -> int | None:
  """Model FLOPs of a training token, forward and backward; None for another model.

  Three times the forward pass: its operations, and twice as many for the gradients of both operands
  of each product. Recomputed activations do not count. The forward pass takes

    2                     for each parameter of the body, without learned positions
    4 · heads · head_dim  for each attended position of each layer: scores and weighted values
    `flops_per_token`     of the embedding, of memories and of the head, which is less than
                          2 · V · D where the head is compressed

  All positions of a window count as attended, as in PaLM's appendix B (6N + 12 · L · H · Q · T) and
  nanoGPT, whatever is masked.
  """
  if not isinstance(model, LanguageModel):
    return None
  memories = getattr(model, "memories", ())
  own = {"embedding", "head", "position"} | {f"memories_{n}" for n in range(len(memories))}
  body = {name: tree for name, tree in params.items() if name not in own}
  forward = 2 * sum(x.size for x in jax.tree.leaves(body))
  forward += sum(part.flops_per_token() for part in (model.embedding, *memories, model.head))
  if isinstance(model, Transformer):
    window = model.context if model.window is None else min(model.window, model.context)
    attended = sum(window if local else model.context for local in model.is_local())
    width = model.heads * (model.attention.head_dim or model.dim // model.heads)
    forward += 4 * width * attended
  return 3 * forward


@dataclasses.dataclass(frozen=True)
class Throughput:
  """What a rate of tokens means for a model on its devices.

  Attributes:
    flops: model FLOPs of a token; None where they are not counted.
    peak: bfloat16 operations a second of all devices together; None for devices whose peak is not
      known.
  """

  flops: int | None = None
  peak: float | None = None

  @staticmethod
  def of(model: Any, params: Any, mesh: Mesh) -> "Throughput":
    """The throughput of a model on a mesh."""
    chip = chips.of_kind(mesh.devices.flat[0].device_kind)
    return Throughput(flops_per_token(model, params), chip and chip.flops * mesh.size)

  def numbers(self, tokens_per_second: float) -> dict[str, float | None]:
    """The rate, model FLOPs a second and their share of the peak (MFU); None where not known."""
    rate = None if self.flops is None else self.flops * tokens_per_second
    return {
      "tokens_per_second": tokens_per_second,
      "model_flops_per_second": rate,
      "mfu": None if rate is None or self.peak is None else rate / self.peak,
    }

  def text(self, tokens_per_second: float) -> str:
    """A line such as "118,000 tokens/s, 142 TFLOP/s, 14.4 % of the peak"."""
    found = self.numbers(tokens_per_second)
    parts = [f"{tokens_per_second:,.0f} tokens/s"]
    if found["model_flops_per_second"] is not None:
      parts.append(f"{found['model_flops_per_second'] / 1e12:.3g} TFLOP/s")
    if found["mfu"] is not None:
      parts.append(f"{found['mfu']:.1%} of the peak".replace("%", " %"))
    return ", ".join(parts)
