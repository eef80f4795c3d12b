"""How much faster and smaller are the compressed heads than a dense softmax?"""

import jax
from rich.console import Console
from rich.table import Table

from experiments.bench_softmax import materialised_loss
from experiments.timing import compare
from vqjax import CodebookHead, DenseHead, GroupedHead, Head
from vqjax.training.provenance import device


def head_program(head: Head, tokens: int):
  """(loss and gradient of a freshly initialised head, its arguments)."""
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = jax.random.normal(keys[0], (tokens, head.dim))
  targets = jax.random.randint(keys[1], (tokens,), 0, head.vocab)
  variables = jax.jit(head.init)(keys[2], hidden[:1])
  tables = {name: tree for name, tree in variables.items() if name != "params"}

  def loss(params, hidden, tables, targets):
    return -head.apply({"params": params, **tables}, hidden, targets, method="log_prob").mean()

  arguments = variables["params"], hidden, tables, targets
  return jax.value_and_grad(loss, argnums=(0, 1)), arguments


def materialised_program(vocab: int, dim: int, tokens: int):
  """(loss and gradient with all logits at once, its arguments)."""
  _, (params, hidden, _, targets) = head_program(DenseHead(vocab, dim), tokens)
  loss = jax.value_and_grad(materialised_loss, argnums=(0, 1))
  return loss, (hidden, params["weight"], targets)


def against_dense(console: Console, vocab: int, n=4096, d=256, codes=1024) -> None:
  """Prints every head's cost at one vocabulary, relative to the materialised dense loss."""
  programs = {"dense, materialised": materialised_program(vocab, d, n)} | {
    name: head_program(head, n)
    for name, head in {
      "dense, tiled": DenseHead(vocab, d),
      f"codebook K={codes}": CodebookHead(vocab, d, codes),
      f"codebook K={codes} + bias": CodebookHead(vocab, d, codes, token_bias=True),
      "grouped": GroupedHead(vocab, d),
    }.items()
  }
  timed = compare(programs)
  first = timed["dense, materialised"]
  table = Table(title=f"loss and gradient, N={n} D={d} V={vocab} float32, {device()}")
  for column in ("", "ms", "times faster", "temp MiB", "times smaller"):
    table.add_column(column, justify="left" if not column else "right")
  for name, t in timed.items():
    table.add_row(
      name,
      f"{t.seconds * 1e3:.1f}",
      f"{first.seconds / t.seconds:.1f}",
      f"{t.temp_bytes / 2**20:.1f}",
      f"{first.temp_bytes / max(t.temp_bytes, 1):.1f}",
    )
  console.print(table)


def growth(console: Console, small=32000, large=267_735, n=4096, d=256, codes=1024) -> None:
  """Prints what a larger vocabulary costs a codebook."""
  programs = {
    f"{vocab}{' + bias' if bias else ''}": head_program(
      CodebookHead(vocab, d, codes, token_bias=bias), n
    )
    for bias in (False, True)
    for vocab in (small, large)
  }
  timed = compare(programs, rounds=25)
  for suffix in ("", " + bias"):
    ratio = timed[f"{large}{suffix}"].seconds / timed[f"{small}{suffix}"].seconds
    console.print(
      f"codebook K={codes}{suffix}: V={large} takes {ratio:.2f}x the time of V={small}",
      highlight=False,
    )


if __name__ == "__main__":
  terminal = Console()
  against_dense(terminal, 32000)
  growth(terminal)
  against_dense(terminal, 50257)
