"""Why does a row differ from the paper's? By arithmetic, where there is any."""

import re

from experiments.studies.study import Results
from experiments.studies.vq_logits.measured import vocab
from experiments.studies.vq_logits.paper import BODIES
from experiments.studies.vq_logits.rows import MAIN, Line, Table
from experiments.studies.vq_logits.settings import Setting


def notes(table: Table, results: Results) -> list[str]:
  """A sentence or more for each row that has something to say, and one on the order of the rows."""
  here = vocab(results, table.setting.name)
  said = []
  for line in _own(table):
    parts = [_recipe(line, table.setting), _split(line), _possible(line, table.setting, here)]
    told = " ".join(part for part in parts if part)
    said += [f"{line.label}: {told}"] if told else []
  return said + _order(table)


def _own(table: Table) -> list[Line]:
  """Without the rows of an ablation that its setting's main table has explained."""
  if table.name in MAIN.values():
    return list(table.lines)
  return [line for line in table.lines if not re.fullmatch(r"full|vq-\d+", line.name)]


def _codes(line: Line) -> int | None:
  """K of a row of the paper, whether it was run or not."""
  match = re.match(r"vq-(\d+)", line.name)
  return int(match[1]) if match else None


def _kind(line: Line) -> str:
  """ "vq-1024-random" is "random", "vq-1024" is ""; other names stay."""
  return re.sub(r"^vq-\d+-?", "", line.name)


def _recipe(line: Line, s: Setting) -> str:
  """What was done here and where the paper's own account does not add up."""
  more, whole = s.fine_tune.steps, s.whole.steps
  return {
    "dense": f"{s.train.steps:,} steps; every converted row starts from it.",
    "full": f"the same start and the same {more:,} further steps as a converted row.",
    "full-scratch": f"{whole:,} steps; beside it are the rows that are trained from scratch.",
    "adaptive": f"cutoffs {_listed(s.cutoffs)}, factor 4, {whole:,} steps from scratch."
    + _parameters_of_adaptive(s),
    "low-rank": f"{whole:,} steps from scratch." + _parameters_of_low_rank(s),
    "scratch": f"{whole:,} steps; the codes are k-means of input embeddings that are still random.",
    "bins": "as many tokens on each code, by rank.",
    "tied": f"{whole:,} steps from scratch; frequent tokens have codes of their own, and each token"
    " a bias.",
    "fixed": "the body is fine-tuned, C is not.",
  }.get(_kind(line), "")


def _listed(values: tuple[int, ...]) -> str:
  return " and ".join(f"{value:,}" for value in values)


def _parameters_of_adaptive(s: Setting) -> str:
  if s.name != "wikitext":
    return ""
  d, v, first, second = BODIES[s.name].dim, BODIES[s.name].vocab, 20_000, 80_000
  head = d * (first + 2)
  tails = sum((d + n) * w for n, w in ((second - first, d // 4), (v - second, d // 16)))
  return (
    f" The paper's cutoffs (20,000 and 80,000) with factor 4 have {(head + tails) / 1e6:.1f} M"
    " parameters, not the 52.1 M that it prints."
  )


def _parameters_of_low_rank(s: Setting) -> str:
  if s.name != "wikitext":
    return ""
  d, v = BODIES[s.name].dim, BODIES[s.name].vocab
  return (
    f" The paper chose rank 512 to be comparable, which has {(d + v) * 512 / 1e6:.1f} M parameters;"
    f" with those of K = 1,024 the rank would be {1024 * d / (d + v):.1f}."
  )


def _split(line: Line) -> str:
  """The measured perplexity as a product: exact for a codebook without a token bias."""
  m = line.measured
  if m.perplexity is None or m.floor is None:
    return ""
  if m.token_bias:
    return f"The best bias would leave {m.floor_bias:.1f} inside the codes."
  return (
    f"{m.perplexity.mean:,.1f} = {m.floor:,.1f} inside the codes × {m.code_perplexity:,.1f} for"
    " the code."
  )


def _possible(line: Line, s: Setting, here: int | None) -> str:
  """Whether the paper's number can be, with codes such as these."""
  body, k, floor = BODIES[s.name], _codes(line), line.measured.floor
  if line.paper is None or k is None or _kind(line) == "tied":
    return ""
  printed = line.paper.perplexity
  if _kind(line) in ("bins", "random"):
    return (
      f"Codes of {'' if _kind(line) == 'bins' else 'nearly '}equal size leave V/K ="
      f" {body.vocab:,}/{k:,} = {body.vocab / k:,.0f}, whatever the body is: the paper's"
      f" {printed:g} cannot come from its Eq. 3-5."
    )
  if floor is None:
    return f"The paper's mean code has V/K = {body.vocab:,}/{k:,} = {body.vocab / k:,.1f} tokens."
  larger = "" if here in (None, body.vocab) else f" on {body.vocab / here:.1f} times the vocabulary"
  if printed < floor:
    return f"The paper prints {printed:g}{larger}: below the floor of these codes."
  return (
    f"The paper prints {printed:g}{larger}: at this floor {printed / floor:.1f} would be left for"
    f" the code, where its full softmax has {line.paper_full.perplexity:g} for the word."
  )


def _order(table: Table) -> list[str]:
  """The rows of both, from the best to the worst."""
  both = [line for line in table.lines if line.paper and line.measured.perplexity]
  if len(both) < 3:
    return []
  name = lambda line: re.sub(r" \(\d+\)", "", line.label)  # a rank is not the paper's
  listed = lambda key: " < ".join(map(name, sorted(both, key=key)))
  paper = listed(lambda line: line.paper.perplexity)
  own = listed(lambda line: line.measured.perplexity.mean)
  same = "the same" if paper == own else own
  return [f"Order in the paper: {paper}; here: {same}."]
