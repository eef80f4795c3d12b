"""Which numbers does the paper of the grouped head print?"""

from typing import NamedTuple


class Graded(NamedTuple):
  """A row of Table 1: grades of 0 to 10, and the age of a child that would write so, in years."""

  grammar: float
  creativity: float
  consistency: float
  plot: float
  age: float


TABLE_1 = {
  "gpt-2": {
    128: Graded(3.8, 4.22, 3.7, 2.95, 4.55),
    256: Graded(4.65, 3.6, 6.05, 4.82, 4.75),
    512: Graded(5.82, 3.9, 7.15, 5.75, 4.9),
  },
  "gpt-neo": {
    128: Graded(3.7, 3.72, 4.05, 2.97, 4.5),
    256: Graded(4.77, 4.1, 5.85, 4.57, 4.65),
    512: Graded(5.15, 4.17, 6.65, 5.22, 5.0),
  },
  "grouped": {
    128: Graded(3.53, 3.62, 4.5, 3.25, 4.55),
    256: Graded(4.85, 4.3, 5.87, 4.47, 4.7),
    512: Graded(5.15, 4.025, 6.7, 5.475, 4.96),
  },
}
"""Row -> width -> its grades on TinyStories after an epoch."""

WIDTHS = 128, 256, 1024, 2048
"""Of Tables 2 and 3."""

SIZES = {128: "8.1 M", 256: "19.3 M", 1024: "152 M", 2048: "659 M"}
"""Width -> the size of the model that the paper gives."""

TABLE_2 = {
  "gpt-2": {128: 14.0, 256: 16.0, 1024: 28.0, 2048: None},
  "gpt-neo": {128: 13.0, 256: 18.0, 1024: 30.0, 2048: None},
  "grouped": {128: 3.8, 256: 5.2, 1024: 16.6, 2048: 39.0},
}
"""Row -> width -> GB of an L40s that training reserved at the most; None: out of memory."""


class Speed(NamedTuple):
  """Of Table 3: tokens a second on an L40s, and "GFLOPs" of a forward pass of 512 tokens."""

  tokens: float
  gflops: float | None


TABLE_3 = {
  "gpt-2": {128: Speed(108_373, 4.10), 256: Speed(90_458, 9.00), 1024: Speed(32_194, 72.0)},
  "gpt-neo": {128: Speed(80_757, 4.64), 256: Speed(69_967, 10.0), 1024: Speed(31_523, 82.0)},
  # The second of these the table leaves out.
  "grouped": {128: Speed(313_049, 0.83), 256: Speed(234_268, None), 1024: Speed(59_106, 52.0)},
}
"""Row -> width -> speed."""


def divisors(number: int) -> tuple[int, ...]:
  """Those that divide it, rising."""
  return tuple(n for n in range(1, number + 1) if number % n == 0)


FACTORED = 50_232
"""The number near its V of 50,258 whose divisors the paper takes as group sizes: it has 64."""

ABLATED = divisors(FACTORED)[4:-4]
"""The sizes of Figure 3: without the four at either end."""

COUNTS = {"dense": 104_087_552, "grouped": 10_340_999}
"""Parameters of the classifier of pictures."""
