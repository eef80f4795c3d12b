"""Which of the grouped head paper's numbers and claims contradict its own text?

Each correction is computed here, from the sizes that it gives.
"""

import math

from experiments.studies.grouped.paper import TABLE_2, TABLE_3

V, CONTEXT, BATCH, LAYERS = 50_257, 512, 32, 8


def decoder_params(dim: int) -> int:
  """Of its tied GPT-2: embedding, positions, blocks with their biases and norms, the last norm."""
  block = 12 * dim * dim + 13 * dim
  return (V + CONTEXT) * dim + LAYERS * block + 2 * dim


def empty_slots(classes: int) -> tuple[int, int, int]:
  """(G, S, slots that stand for no class) of G = floor(sqrt V) groups of S = ceil(V/G)."""
  groups = math.isqrt(classes)
  slots = -(-classes // groups)
  return groups, slots, groups * slots - classes


def logits_bytes(rows: int, context: int, vocab: int) -> int:
  """Of a float32 tensor of logits."""
  return 4 * rows * context * vocab


def macs(dim: int, outputs: int, attention: bool = False) -> float:
  """1e9 multiply-accumulates of `CONTEXT` tokens: blocks and so many scores of the head."""
  weights = CONTEXT * dim * (LAYERS * 12 * dim + outputs)
  return (weights + attention * 2 * LAYERS * CONTEXT**2 * dim) / 1e9


def memory_ratios(name: str) -> list[float]:
  """Of Table 2, the memory of a dense model over the grouped one's, where both have some."""
  theirs, own = TABLE_2[name], TABLE_2["grouped"]
  return [theirs[dim] / own[dim] for dim in own if theirs[dim] is not None]


def notes() -> str:
  """What does not hold, and why."""
  widths = ", ".join(f"{decoder_params(dim) / 1e6:.1f} M at {dim}" for dim in (128, 256, 1024))
  groups, slots, empty = empty_slots(184_320)
  scores = sum(empty_slots(V)[:2])
  logits = logits_bytes(BATCH, CONTEXT, 50_000)
  over = lambda name: ", ".join(f"{ratio:.1f}" for ratio in memory_ratios(name))
  best = ", ".join(f"{math.sqrt(V / arrays):.0f}" for arrays in (1, 4, 8))
  lines = (
    f"- A tied GPT-2 of 8 layers, {CONTEXT} positions and V = {V:,} has {widths}, as printed; of",
    f"  width 2048 it has {decoder_params(2048) / 1e6:.1f} M, not 659 M.",
    f"- [32, 512, 50,000] in float32 is {logits / 1e9:.2f} GB, not 3.32. Training holds its",
    "  softmax and its gradient as well.",
    '- "3.4x" less memory is against GPT-Neo, whose cross-entropy materialises all logits in',
    f"  float32: {over('gpt-neo')} of Table 2, on an L40s. Against GPT-2 its numbers give"
    f" {over('gpt-2')}",
    '  times. A dense loss in tiles, which holds no logits either, is the row "loss in tiles" of',
    "  Tables 2 and 3.",
    f"- 184,320 classes in G = {groups} groups of S = {slots} leave {groups * slots:,} - 184,320 =",
    f"  {empty} slots without a class. Unless they are masked the probabilities of the classes do",
    "  not add up to 1; here they are.",
    "- S = G = sqrt(V) is the least memory only for one array [N, S] and one [N, G]. Training",
    "  holds several of [N, S], the gathered scales and shifts among them: with c of them the",
    f"  optimum is S = sqrt(V/c): {best} tokens a group for c = 1, 4, 8.",
    f'- Its "FLOPs" are multiply-accumulates: {CONTEXT} tokens through width 128 take',
    f"  {macs(128, V):.2f} G of them with the dense head and {macs(128, scores):.2f} G with the",
    "  grouped one, as printed, without attention. With it they are"
    f" {macs(128, V, attention=True):.2f} G",
    f"  and {macs(128, scores, attention=True):.2f} G; the former is what it prints for GPT-Neo."
    " Of widths",
    f"  256 and 1024 GPT-2 has {macs(256, V):.2f} and {macs(1024, V):.1f} G, where it prints"
    f" {TABLE_3['gpt-2'][256].gflops:.2f} and {TABLE_3['gpt-2'][1024].gflops:.1f}.",
    "- Table 1's columns say nothing of the spread: with grades of some stories by one judge, the",
    "  differences of a few tenths between its models need not be any.",
  )
  return "## What the paper gets wrong by its own sizes\n\n" + "\n".join(lines) + "\n"
