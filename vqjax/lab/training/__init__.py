"""Training of experiments: steps, checkpoints, resumption and evaluation."""

from vqjax.lab.training.checkpoint import FromRun, read_run_variables, saved_steps
from vqjax.lab.training.evaluate import Cost, Score, evaluate, loss_cost, make_scorer
from vqjax.lab.training.interrupt import Interrupted
from vqjax.lab.training.loop import NotFiniteError, fit
from vqjax.lab.training.optimizer import SGD, NewRows, RowwiseTables, learning_rate, optimizer
from vqjax.lab.training.step import TrainState, init_state

__all__ = [
  "SGD",
  "Cost",
  "FromRun",
  "Interrupted",
  "NewRows",
  "NotFiniteError",
  "RowwiseTables",
  "Score",
  "TrainState",
  "evaluate",
  "fit",
  "init_state",
  "learning_rate",
  "loss_cost",
  "make_scorer",
  "optimizer",
  "read_run_variables",
  "saved_steps",
]
