"""The declaration of a study: one base, rows that differ from it, and what is tuned."""

import ast
import copy
import dataclasses
import functools
import inspect
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from vqjax.lab.config import Experiment, config_hash, load_function, with_fields
from vqjax.lab.study.compressed import Derived
from vqjax.lab.study.tuning import EXTENSIONS, ROUNDS, SearchSpace, stretched
from vqjax.lm.records import shown

__all__ = ["Row", "Run", "Study", "load_study"]

TUNING_SEED = 100
"""Added to the seed of the base, for tunings: not the seed of a row."""

PLAIN = (bool, int, float, str, type(None))
"""Types of the values that a tuning tries, which JSON has."""


class FieldError(ValueError):
  """An error of a field in the file of a study.

  Attributes:
    texts: texts of the file that name the field, the most telling first.
  """

  def __init__(self, message: str, *texts: str):
    super().__init__(message)
    self.texts = texts


class Run(NamedTuple):
  """A run of a row that another row begins from.

  Attributes:
    experiment: its experiment, with what its tuning chose.
    folder: its run folder.
  """

  experiment: Experiment
  folder: str

  @classmethod
  def of(cls, experiment: Experiment, folder: str) -> "Run":
    """A run whose model shares no layer with those of other rows: equal parts would be one."""
    return cls(dataclasses.replace(experiment, model=copy.deepcopy(experiment.model)), folder)


Runs = Callable[[str], Run]
"""Row -> its run of the same seed."""


@dataclasses.dataclass(frozen=True)
class Row:
  """A row with more than its fields.

  Attributes:
    fields: dotted path of a field of the experiment -> its value, or a lambda that makes it of the
      base, such as `lambda base: CodebookHead(0, base.model.dim, 64)`, or of the base and of the
      runs of rows before it: `lambda base, run: FromRun(run("dense").folder)`. Or a function of
      these that makes the whole experiment, whose name and seed become those of the row.
    label: name in tables; "": that of the row.
    tune: what this row tries, in place of the study's `tune`; None: the same.
    tuned_as: the row whose tuning it has, in place of its own; "": its own.
    seeds: number of its seeds; None: that of the study.
  """

  fields: Mapping[str, Any] | Callable[..., Experiment] = dataclasses.field(default_factory=dict)
  label: str = ""
  tune: Mapping[str, Sequence[Any]] | None = None
  tuned_as: str = ""
  seeds: int | None = None


@dataclasses.dataclass(frozen=True)
class Study:
  """Rows that are compared on one text, with one budget, tuned alike and paired by seed.

  Example:

    def study():
      return Study(
        base=experiment(),
        rows={"dense": {}, "codebook": {"model.head": CodebookHead(0, 128, codes=64)}},
        tune={"train.learning_rate": (1e-3, 2e-3, 4e-3)},
      )

  Attributes:
    base: the experiment that every row begins from.
    rows: name -> what differs from the base, as in `Row.fields`, or a `Row`; or a `Derived` row of
      another, such as `Compressed`.
    tune: dotted path of a field -> the values that every row tries, all combinations, on the
      validation split. {}: nothing is tuned.
    seeds: number of seeds of each row: that of the base, and the next ones.
    reference: name of the row from which differences are taken; "": the first.
    margin: relative difference of perplexity within which rows count as equal.
    extensions: values beyond those of a field that a tuning tries at most, where its winner lies at
      an edge of them.
    rounds: the rounds of a tuning: 8 trains each candidate for an eighth of its row's steps, and a
      third of them, at least two, go on to the next round, from the start. Give (1,) to tune
      dropout and what else prevents overfitting: short trainings do not overfit.
    measure: (experiment, run folder) -> further measurements, kept beside the result of each
      finished run. The experiment is that of the folder's config.json: where the row begins from
      another's run, it names the identity of that run in place of its folder.

  Raises:
    ValueError: a row or a field does not exist or cannot have a value; every row is made once to
      say so before anything is trained.
  """

  base: Experiment
  rows: Mapping[str, Mapping[str, Any] | Callable[..., Experiment] | Row | Derived]
  tune: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
  seeds: int = 3
  reference: str = ""
  margin: float = 0.01
  extensions: int = EXTENSIONS
  rounds: Sequence[int] = ROUNDS
  measure: Callable[[Experiment, pathlib.Path], dict[str, Any]] | None = None

  # What was made of the fields, which a study of many rows and seeds asks for again and again.
  _made: dict = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)
  _begun: dict = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

  def __post_init__(self):
    if not isinstance(self.base, Experiment):
      raise FieldError(
        f"`base` must be a config.Experiment; got {shown(self.base)}. Give what the experiment() of"
        " a config returns.",
        "base",
      )
    if not isinstance(self.rows, Mapping) or not self.rows:
      raise FieldError(
        f'`rows` must name the rows; got {shown(self.rows)}. Give {{"dense": {{}}, ...}}.', "rows"
      )
    if type(self.seeds) is not int or not 1 <= self.seeds <= TUNING_SEED:
      raise FieldError(
        f"`seeds` must be in [1, {TUNING_SEED}]; got {shown(self.seeds)}. 3 is usual.", "seeds"
      )
    if type(self.extensions) is not int or self.extensions < 0:
      raise FieldError(
        f"`extensions` must be an integer of at least 0; got {shown(self.extensions)}. 2 is usual.",
        "extensions",
      )
    parts = self.rounds if isinstance(self.rounds, (tuple, list)) else ()
    if not parts or not all(type(part) is int and part >= 1 for part in parts):
      raise FieldError(
        f"`rounds` must be integers of at least 1; got {shown(self.rounds)}. Give (8, 4), or (1,)"
        " for all steps.",
        "rounds",
      )
    if not 0 <= self.margin < 1:
      raise FieldError(
        f"`margin` must be in [0, 1); got {shown(self.margin)}. 0.01 is one per cent.", "margin"
      )
    object.__setattr__(self, "reference", self.reference or next(iter(self.rows)))
    if self.reference not in self.rows:
      raise FieldError(
        f"`reference` must be a row; got {self.reference!r}. The rows are {', '.join(self.rows)}.",
        "reference",
      )
    for name in self.rows:
      self._check_row(name)

  def _check_row(self, name: str) -> None:
    """Make a row, and it with each value that it tries."""
    if {*name} & {*"/,"}:
      raise FieldError(
        f"a name in `rows` must have no slash and no comma; got {name!r}. Rename it: a `label` may"
        " have them.",
        name,
      )
    if isinstance(row := self.row(name), Derived):
      if row.of not in self.trained:
        raise FieldError(
          f"`of` must be a row that is trained; got {row.of!r} in row {name}. Name one.", name
        )
      try:
        row.check(self.experiment(row.of))
      except ValueError as error:
        raise FieldError(f"row {name}: {error}", name) from error
      return
    names = list(self.rows)
    tuned = [each for each in names[: names.index(name)] if each in self.trained]
    tuned = [each for each in tuned if not self.row(each).tuned_as]
    if row.tuned_as and row.tuned_as not in tuned:
      raise FieldError(
        f"`tuned_as` must be a row before it that has a tuning; got {row.tuned_as!r} in row {name}."
        f" There are {', '.join(tuned) or 'none'}.",
        name,
      )
    if row.tuned_as and self.rows[name].tune is not None:
      raise FieldError(
        f"`tune` must be None in a row with `tuned_as`; got both in row {name}. Leave out one.",
        name,
      )
    if row.seeds is not None and (type(row.seeds) is not int or not 1 <= row.seeds <= self.seeds):
      raise FieldError(
        f"`seeds` must be in [1, {self.seeds}], the study's; got {row.seeds} in row {name}. Raise"
        " those of the study, or lower these.",
        name,
      )
    space, tried = self.space(name), ""
    try:
      plain = self.experiment(name)
      config_hash(plain)
      for source in self.begins_from(name):
        if self.seeds_of(source) < self.seeds_of(name):
          raise ValueError(
            f"`seeds` must be at most those of {source}, from which it begins,"
            f" {self.seeds_of(source)}; got {self.seeds_of(name)}. Change one of them."
          )
      for tried, values in space.values.items():
        for value in values:
          with_fields(plain, {tried: value})
    except ValueError as error:
      field = re.search(r"`([\w.]+)`", str(error))
      texts = filter(None, (tried, field and field[1], name))
      raise FieldError(f"row {name}: {error}", *texts) from error

  @property
  def trained(self) -> list[str]:
    """Names of the rows that are trained: those that are not derived from others."""
    return [name for name, row in self.rows.items() if not isinstance(row, Derived)]

  def row(self, name: str) -> Row | Derived:
    """A row with its label, and of a trained one what it tries."""
    given = self.rows[name]
    if isinstance(given, Derived):
      return dataclasses.replace(given, label=given.label or name)
    row = given if isinstance(given, Row) else Row(given)
    tune = self.tune if row.tune is None else row.tune
    return dataclasses.replace(row, label=row.label or name, tune=tune)

  def seeds_of(self, name: str) -> int:
    """The number of seeds of a row; a derived one has those of its source."""
    row = self.row(name)
    if isinstance(row, Derived):
      return self.seeds_of(row.of)
    return self.seeds if row.seeds is None else row.seeds

  def begins_from(self, name: str) -> tuple[str, ...]:
    """The rows whose runs a trained row begins from."""
    if name not in self._begun:
      asked: list[str] = []

      def run(row: str) -> Run:
        asked.append(row)
        return self._earlier(name)(row)

      self._experiment(name, 0, Fraction(1), run)
      self._begun[name] = tuple(dict.fromkeys(asked))
    return self._begun[name]

  def space(self, name: str) -> SearchSpace:
    """What a trained row tries."""
    tune = self.row(self.row(name).tuned_as or name).tune
    for field, values in tune.items():
      is_plain = isinstance(values, (tuple, list)) and all(isinstance(v, PLAIN) for v in values)
      if not is_plain or not values:
        raise FieldError(
          f"`tune` must name values of numbers or texts; got {shown(values)} for {field}. Write"
          f" {field!r}: (1e-3, 2e-3), and make a row of what is an object.",
          field,
        )
    return SearchSpace({field: tuple(values) for field, values in tune.items()})

  def experiment(
    self, name: str, seed: int = 0, scale: Fraction = Fraction(1), runs: Runs | None = None
  ) -> Experiment:
    """The experiment of a trained row before its tuning.

    Args:
      name: the row.
      seed: number of the seed, from 0.
      scale: how often the steps of the base are trained.
      runs: row -> its run, for a row that begins from others; None: runs without a tuning, in
        folders that do not exist.
    """
    if runs is not None and self.begins_from(name):
      return self._experiment(name, seed, scale, runs)
    known = name, seed, scale
    if known not in self._made:
      self._made[known] = self._experiment(name, seed, scale, self._earlier(name, seed))
    return self._made[known]

  def _experiment(self, name: str, seed: int, scale: Fraction, runs: Runs) -> Experiment:
    base = dataclasses.replace(self.base, name=name, seed=self.base.seed + seed)
    fields = self.row(name).fields
    if isinstance(fields, Mapping):
      values = {path: _made(value, base, runs) for path, value in fields.items()}
      made = with_fields(base, values)
    else:
      made = _called(fields, base, runs)
      if not isinstance(made, Experiment):
        raise ValueError(
          f"a function in `rows` must return an Experiment; got {shown(made)}. Return one, or give"
          " fields with their values."
        )
      made = dataclasses.replace(made, name=name, seed=base.seed)
    if scale == 1:
      return made
    return dataclasses.replace(made, train=stretched(made.train, scale))

  def _earlier(self, name: str, seed: int = 0) -> Runs:
    """Runs of the rows before a row, as if they were."""
    names = list(self.rows)
    before = [row for row in names[: names.index(name)] if row in self.trained]

    @functools.cache
    def run(row: str) -> Run:
      if row not in before:
        raise ValueError(
          f"`run` must name a trained row before {name}; got {row!r}. There are"
          f" {', '.join(before) or 'none'}: put it before."
        )
      return Run.of(self.experiment(row, seed), f"runs/{row}")

    return run


def _made(value: Any, base: Experiment, runs: Runs) -> Any:
  """The value of a field; a lambda, which no field may hold, makes it of the base and of runs."""
  if not inspect.isfunction(value) or value.__name__ != "<lambda>":
    return value
  return _called(value, base, runs)


def _called(function: Callable[..., Any], base: Experiment, runs: Runs) -> Any:
  """What a function makes of the base, or of the base and of runs, as it has arguments."""
  parameters = inspect.signature(function).parameters.values()
  asked = sum(parameter.default is parameter.empty for parameter in parameters)
  return function(*(base, runs)[:asked])


def load_study(path: str | pathlib.Path, function: str = "study") -> Study:
  """Import a file and return what its function `study()` returns, or another one.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file defines no study; or an error of it, with the file, the line and the field.
  """
  path = pathlib.Path(path)
  try:
    return load_function(path, function, Study)
  except ValueError as error:
    cause = error.__cause__
    if not isinstance(cause, FieldError):
      raise
    lines = {}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
      text = node.value if isinstance(node, ast.Constant) else getattr(node, "arg", None)
      if isinstance(text, str):
        lines.setdefault(text, node.lineno)
    found = [lines[text] for text in cause.texts if text in lines]
    if not found:
      raise
    raise ValueError(f"{path}, line {found[0]}: {cause}") from cause
