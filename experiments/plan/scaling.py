"""Plans of heads on 8 to 1,024 chips: memory and communication of a chip.

python -m experiments.plan.scaling                        plan what is missing, then render
python -m experiments.plan.scaling --models lm_1b --devices H100 --chips 8 64
python -m experiments.plan.scaling --render               the table and the plots alone

TPUs need the extra `plan` and GPUs the extra `plan-gpu`, each in an environment of its own.
"""

import argparse
import dataclasses
import importlib
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from configs.large import HEADS
from experiments.plan import scaling_report
from experiments.plan.isolated import isolated
from vqjax.commands.console import configure_warnings
from vqjax.lab import chips, exits
from vqjax.lab.config import Experiment
from vqjax.lab.plan import compiling
from vqjax.lab.plan.step_plan import step_plan
from vqjax.lm import records
from vqjax.sharding import MeshShape, make_mesh

RESULTS = pathlib.Path("docs/results/scaling.jsonl")
TABLE = RESULTS.with_suffix(".md")
IMAGES = pathlib.Path("docs/images")

WINDOWS = {"lm_1b": 2, "lm_8b": 1}
"""Config -> windows in a batch for each chip, which make 4,096 tokens."""

VOCABULARIES = (32_768, 131_072, 262_144)
TPU = "v5p"
TOPOLOGIES = {16: "v5p:2x2x4", 64: "v5p:4x4x4", 256: "v5p:4x8x8", 1024: "v5p:8x8x16"}
SIZES = {TPU: tuple(TOPOLOGIES), "H100": (8, 64, 1024)}
"""Kind of device -> numbers of devices."""

MODEL = 8
"""Chips along the axis `model` of every mesh; `fsdp` has all others."""


@dataclasses.dataclass(frozen=True)
class GridCell:
  """A plan of the grid: a config, its head and vocabulary, and a number of devices of a kind."""

  config: str
  head: str
  vocab: int
  device: str
  chips: int

  def experiment(self) -> Experiment:
    """The planned experiment; its batch is proportional to the number of chips."""
    made = importlib.import_module(f"configs.{self.config}").experiment(self.head, self.vocab)
    train = dataclasses.replace(
      made.train,
      batch=WINDOWS[self.config] * self.chips,
      mesh=MeshShape(data=1, fsdp=self.chips // MODEL, model=MODEL),
    )
    return dataclasses.replace(made, train=train)


def grid(
  models: Sequence[str] = tuple(WINDOWS),
  vocabularies: Sequence[int] = VOCABULARIES,
  devices: Sequence[str] = tuple(SIZES),
  sizes: Sequence[int] | None = None,
) -> Iterator[GridCell]:
  """Cells of the grid in the order of the arguments; `sizes` None: all of each device."""
  for config, vocab, device in itertools.product(models, vocabularies, devices):
    for count, head in itertools.product(SIZES[device], HEADS):
      if sizes is None or count in sizes:
        yield GridCell(config, head, vocab, device, count)


def planned(cell: GridCell) -> dict[str, Any]:
  """The row of a cell: its fields, and its plan or the error."""
  jax.config.update("jax_platforms", "cpu")
  if cell.device == TPU:
    topology = TOPOLOGIES[cell.chips]
    chip, devices = chips.tpu(topology), compiling.tpu_devices(topology)
  else:
    compiling.check_gpu_compiler()
    chip, devices = chips.gpu(cell.device), compiling.gpu_devices(cell.device, cell.chips)
  experiment = cell.experiment()
  mesh = make_mesh(experiment.train.mesh, devices)
  return dataclasses.asdict(cell) | {"plan": step_plan(experiment, mesh, chip)}


def read_plan_rows(path: pathlib.Path) -> dict[GridCell, dict[str, Any]]:
  """The newest row of each cell.

  Raises:
    ValueError: a line is no row; the message names it.
  """
  fields = [field.name for field in dataclasses.fields(GridCell)]
  kept = records.read_json_rows(path, GridCell, "Restore or remove the line.", seal=False)
  if kept.problem:
    raise kept.problem
  return {GridCell(**{name: row[name] for name in fields}): row for row in kept.rows}


def fill_plans(path: pathlib.Path, cells: Sequence[GridCell]) -> None:
  """Plan the cells without a plan and append a row to the file for each.

  Each is compiled in a process of its own: what a compiler leaves behind does not add up, and one
  that it brings down is recorded as failed and tried again next time.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  missing = [cell for cell in cells if "plan" not in read_plan_rows(path).get(cell, {})]
  for at, cell in enumerate(missing, 1):
    print(f"{at}/{len(missing)} {cell}", file=sys.stderr, flush=True)
    row = _planned(cell)
    if "failed" in row:
      print(f"  failed: {row['failed']}", file=sys.stderr, flush=True)
    with path.open("a", encoding="utf-8") as file:
      file.write(json.dumps(row, allow_nan=False) + "\n")


def _planned(cell: GridCell) -> dict[str, Any]:
  """The row of a cell, planned in a process of its own: a compiler may crash it."""
  try:
    return isolated(planned, cell)
  except Exception as error:  # a compiler's failures have no type of their own
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return dataclasses.asdict(cell) | {"failed": reason}


def render_plans(rows: Mapping[GridCell, dict[str, Any]]) -> None:
  """Rewrite the tables of the page, and a figure for each model that has a row."""
  order = {cell: rows.get(cell) for cell in grid()}
  scaling_report.update(order, TABLE)
  for config in WINDOWS:
    some = {cell: row for cell, row in order.items() if cell.config == config}
    drawn = {cell: row for cell, row in some.items() if cell.device == TPU}
    if any(row and "plan" in row for row in drawn.values()):
      scaling_report.write_plot(drawn, IMAGES / f"scaling-{config}.png")


def main(arguments: Sequence[str] | None = None) -> int:
  """Plan missing cells and render; return the exit code."""
  options = _parser().parse_args(arguments)
  configure_warnings()
  try:
    if not options.render:
      cells = grid(options.models, options.vocabularies, options.devices, options.chips)
      fill_plans(RESULTS, list(cells))
    render_plans(read_plan_rows(RESULTS))
  except (ValueError, ImportError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.plan.scaling",
    description="Plans two decoders with each head on 8 to 1,024 chips, and renders the result.",
    epilog=f"Rows are appended to {RESULTS}; what has one is not planned again.",
  )
  parser.add_argument("--models", nargs="+", choices=WINDOWS, default=list(WINDOWS))
  parser.add_argument(
    "--vocabularies", nargs="+", type=int, choices=VOCABULARIES, default=list(VOCABULARIES)
  )
  parser.add_argument("--devices", nargs="+", choices=SIZES, default=list(SIZES))
  parser.add_argument(
    "--chips", nargs="+", type=int, choices=sorted({n for some in SIZES.values() for n in some})
  )
  parser.add_argument("--render", action="store_true", help="plan nothing, render what there is")
  return parser


if __name__ == "__main__":
  exits.run_main(main)
