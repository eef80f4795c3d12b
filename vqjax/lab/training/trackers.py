"""Writers of a run's metrics for TensorBoard, Weights & Biases and MLflow, by their own libraries.

Where they write to is what their libraries are told: WANDB_PROJECT and WANDB_MODE, or
MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.
"""

import abc
import hashlib
import os
import pathlib
import time
from collections.abc import Mapping

from tensorboardX import SummaryWriter

from vqjax.lab.data.corpus_files import import_extra
from vqjax.lab.run_files import read_config

__all__ = ["TRACKERS", "TensorBoard", "Tracker"]


class Tracker(abc.ABC):
  """A writer of numbers by their names.

  Args:
    folder: the run folder.
    step: the step that the run goes on after; 0 for a fresh run.
  """

  @abc.abstractmethod
  def __init__(self, folder: pathlib.Path, step: int): ...

  @abc.abstractmethod
  def write(self, values: Mapping[str, float], step: int) -> None:
    """Write the numbers of a step."""

  @abc.abstractmethod
  def close(self) -> None:
    """Write what is pending."""


class TensorBoard(Tracker):
  """Event files in the run folder's `events`."""

  def __init__(self, folder: pathlib.Path, step: int):
    # TensorBoard discards earlier events from this step on, which the resumed run writes again.
    self._events = SummaryWriter(str(folder / "events"), purge_step=step + 1)

  def write(self, values: Mapping[str, float], step: int) -> None:
    for name, value in values.items():
      self._events.add_scalar(name, value, step)

  def close(self) -> None:
    self._events.close()


class WandB(Tracker):
  """A run of Weights & Biases, the same one where a run folder goes on."""

  def __init__(self, folder: pathlib.Path, step: int):
    del step  # wandb drops steps that it has
    self._run = import_extra("wandb", "wandb").init(
      id=_identity(folder),
      name=folder.name,
      dir=str(folder),
      config=(read_config(folder) or {}).get("config"),
      resume="allow",
    )

  def write(self, values: Mapping[str, float], step: int) -> None:
    self._run.log(dict(values), step=step)

  def close(self) -> None:
    self._run.finish()


class MLflow(Tracker):
  """A run of MLflow, the same one where a run folder goes on."""

  def __init__(self, folder: pathlib.Path, step: int):
    del step  # a step that is written again has the same value
    library = import_extra("mlflow", "mlflow")
    self._metric = import_extra("mlflow.entities", "mlflow").Metric
    self._client = client = library.MlflowClient()
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "vqjax")
    found = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if found is None else found.experiment_id
    tag, own = "vqjax.run", _identity(folder)
    earlier = client.search_runs([experiment], f"tags.`{tag}` = '{own}'")
    if earlier:
      self._run = earlier[0].info.run_id
      client.update_run(self._run, status="RUNNING")
    else:
      made = client.create_run(experiment, tags={tag: own}, run_name=folder.name)
      self._run = made.info.run_id
      client.log_dict(self._run, (read_config(folder) or {}).get("config", {}), "config.json")

  def write(self, values: Mapping[str, float], step: int) -> None:
    now = int(1000 * time.time())
    metrics = [self._metric(name, value, now, step) for name, value in values.items()]
    self._client.log_batch(self._run, metrics=metrics)

  def close(self) -> None:
    self._client.set_terminated(self._run)


TRACKERS = {"wandb": WandB, "mlflow": MLflow}
"""Value of `train.tracker` -> the writer beside that for TensorBoard."""


def _identity(folder: pathlib.Path) -> str:
  """A name of the run in this folder that stays when it goes on."""
  kept = (read_config(folder) or {}).get("hash", "")
  return hashlib.sha256(f"{kept} {folder.resolve()}".encode()).hexdigest()[:16]
