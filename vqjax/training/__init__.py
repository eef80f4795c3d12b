"""How is an experiment trained, saved, resumed and evaluated?"""

from vqjax.training.cost import Cost, loss_cost
from vqjax.training.evaluate import Score, evaluate, make_scorer
from vqjax.training.interrupt import Interrupted
from vqjax.training.loop import NotFiniteError, fit
from vqjax.training.optimizer import SGD, SM3, learning_rate, optimizer
from vqjax.training.recluster import Recluster
from vqjax.training.saved import read_variables, saved_steps
from vqjax.training.start import FromPart, FromRun
from vqjax.training.state import TrainState, init_state
from vqjax.training.step import make_step

__all__ = [
  "SGD",
  "SM3",
  "Cost",
  "FromPart",
  "FromRun",
  "Interrupted",
  "NotFiniteError",
  "Recluster",
  "Score",
  "TrainState",
  "evaluate",
  "fit",
  "init_state",
  "learning_rate",
  "loss_cost",
  "make_scorer",
  "make_step",
  "optimizer",
  "read_variables",
  "saved_steps",
]
