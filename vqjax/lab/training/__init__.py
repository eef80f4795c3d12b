"""How is an experiment trained, saved, resumed and evaluated?"""

from vqjax.lab.training.cost import Cost, loss_cost
from vqjax.lab.training.evaluate import Score, evaluate, make_scorer
from vqjax.lab.training.interrupt import Interrupted
from vqjax.lab.training.loop import NotFiniteError, fit
from vqjax.lab.training.optimizer import SGD, SM3, learning_rate, optimizer
from vqjax.lab.training.recluster import Recluster
from vqjax.lab.training.saved import read_variables, saved_steps
from vqjax.lab.training.start import FromPart, FromRun
from vqjax.lab.training.state import TrainState, init_state
from vqjax.lab.training.step import make_step

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
