"""Lower bounds of the time of a step."""

import dataclasses
from collections.abc import Sequence

from vqjax.lab.chips import Chip
from vqjax.lab.plan.collectives import Collective

__all__ = ["Roofline", "roofline"]


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Lower bounds of the time of a step on one chip, in seconds.

  The three bounds assume the published peaks and perfect overlap. Not counted are operations other
  than matrix products, latencies, idle links, values that travel to memory and back inside a layer,
  and waiting for data: real steps take longer.

  Attributes:
    compute: matrix products at the bfloat16 peak.
    memory: arguments read and results written once, temporaries written and read once.
    network: bytes sent over all links of the chip at once.
  """

  compute: float
  memory: float
  network: float

  @property
  def seconds(self) -> float:
    """The largest of the three bounds."""
    return max(self.compute, self.memory, self.network)

  @property
  def limit(self) -> str:
    """The name of the largest bound."""
    named = dataclasses.asdict(self)
    return max(named, key=named.get)


def roofline(chip: Chip, flops: float, traffic: float, sent: Sequence[Collective]) -> Roofline:
  """The roofline of a step with these operations, memory traffic and collectives.

  A group of GPUs that spans nodes is assumed to send all of its bytes between them.
  """
  inside = outside = 0.0
  for one in sent:
    if chip.node is not None and one.spread >= chip.node:
      outside += one.sent
    else:
      inside += one.sent
  network = inside / chip.links + outside / chip.network
  return Roofline(flops / chip.flops, traffic / chip.bandwidth, network)
