"""How does an experiment become a result: train, evaluate, save, resume?"""

import json
import math
import pathlib
import time

import jax
from jax.errors import JaxRuntimeError

from vqjax.embeddings import Embedding
from vqjax.heads import Head
from vqjax.lab.config import Experiment, config_hash
from vqjax.lab.training import cost as cost_of
from vqjax.lab.training import distributed
from vqjax.lab.training.checkpoint import Checkpoints
from vqjax.lab.training.distributed import is_main
from vqjax.lab.training.evaluate import evaluate
from vqjax.lab.training.interrupt import Interrupted, agreed_signal, deferred_signals
from vqjax.lab.training.metrics import MetricsLog
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.progress import progress_bar
from vqjax.lab.training.provenance import peak_memory_bytes, provenance
from vqjax.lab.training.run import RunFolder
from vqjax.lab.training.state import TrainState, all_finite
from vqjax.lab.training.text import Text, load_text
from vqjax.lab.training.watch import DAY
from vqjax.sharding import make_mesh


class NotFiniteError(ArithmeticError):
  """The loss or its gradient is not a finite number: the run cannot go on from here."""


def fit(experiment: Experiment, folder: pathlib.Path) -> dict:
  """Trains the experiment in its run folder, from where an earlier call left it, to its result.

  A finished run returns its result at once. SIGINT and SIGTERM finish the step, save and raise
  `Interrupted`. Of several processes each calls it, after `distributed.start`; a signal to one
  stops all after the same step, process 0 writes, and the folder is on a disk that all share.

  Raises:
    ValueError: the folder belongs to another config; the text, the tokenizer or a checkpoint does
      not fit the model. Nothing is overwritten.
    NotFiniteError: the loss or gradient is not finite; the last good checkpoint is kept.
    OSError: the disk is full or the folder cannot be written, or is not the same for all processes.
  """
  distributed.agree("config", config_hash(experiment))
  distributed.agree("train.mesh", str(experiment.train.mesh))
  text = distributed.main_first("text", lambda: load_text(experiment))
  distributed.agree("text", json.dumps(text.identity), patience=DAY)
  begun = (folder / "config.json").exists()
  # A model that cannot be made must not claim the folder.
  program = None if begun else _program(text)
  run = RunFolder(folder, experiment, text.identity)
  try:
    done = run.result()
    finished = done is not None and done["status"] == "finished"
    return done if finished else _run(experiment, text, run, program or _program(text))
  finally:
    run.close()


def _program(text: Text) -> Program:
  return Program(text.experiment, make_mesh(text.experiment.train.mesh))


def _run(experiment: Experiment, text: Text, run: RunFolder, program: Program) -> dict:
  try:
    outcome = {"status": "finished", **_Run(text, run, program).to_the_end()}
  except NotFiniteError as error:
    run.write_result(_identity(experiment) | {"status": "failed", "error": str(error)})
    raise
  run.write_result(_identity(experiment) | outcome)
  return run.result()


def _identity(experiment: Experiment) -> dict:
  """Whose result it is; the hash is of the config as written, before the vocabulary is known."""
  identity = {"config_hash": config_hash(experiment), "seed": experiment.seed}
  return {"name": experiment.name, **identity, **provenance()}


class _Run:
  """One process's part of a run: from the newest checkpoint to the last step."""

  def __init__(self, text: Text, run: RunFolder, program: Program):
    self.text, self.run = text, run
    self.experiment, self.splits = text.experiment, text.splits
    self.train, self.model = self.experiment.train, self.experiment.model
    self.program = program
    self.batches = self.experiment.loader.batches(
      self.splits["train"],
      batch=self.train.batch,
      context=self.model.context,
      seed=self.experiment.seed,
      rows=self.program.rows,
    )
    recluster = self.experiment.recluster
    self.recluster = recluster and recluster.on(program, self.splits["train"])
    self.checkpoints = Checkpoints(run.path, self.train.keep)
    self.loss, self.clock = None, _Clock()
    self.state = self._resumed() or self._fresh()
    self.began_at = int(self.state.step)

  def _fresh(self) -> TrainState:
    init_key, _ = keys(self.experiment.seed)
    state, start = self.program.init(init_key), self.experiment.init_from
    if start is None:
      return state
    return self.program.begin(start(self.text, self.model, state.variables))

  def _resumed(self) -> TrainState | None:
    restored = self.checkpoints.restore(self.program.abstract_state)
    if restored is None:
      return None
    self.batches.set_state(restored.position["data"])
    self.loss, self.clock = restored.position["loss"], _Clock(**restored.position["clock"])
    return restored.state

  def to_the_end(self) -> dict:
    """Trains what is left, and measures."""
    self.log = MetricsLog(self.run.path, self.began_at) if is_main() else None
    try:
      self._train()
      self.checkpoints.wait()
      return self._result()
    finally:
      if self.log is not None:
        self.log.close()
      self.checkpoints.close()

  def _train(self) -> None:
    name, steps = self.experiment.name, self.train.steps
    tokens = self.train.batch * self.model.context
    pending = None
    with (
      deferred_signals() as stopped_by,
      progress_bar(name, self.began_at, steps, tokens) as report,
    ):
      for step in range(self.began_at + 1, steps + 1):
        batch = self.program.place(next(self.batches))
        self.state, metrics = self.program.step(self.state, batch)
        if step == self.began_at + 1:
          jax.block_until_ready(metrics)  # the first step compiles: the clock starts behind it
          self.clock.start(step)
        # Read one step late: the device already works on the next when the host waits.
        if pending is not None:
          report(step - 1, self._read(*pending))
        pending = step, metrics
        signum = stopped_by() or agreed_signal(step)
        rests, reclusters = signum or self._is_due(step), self._reclusters_after(step)
        if rests or reclusters:
          report(step, self._read(*pending))
          pending = None
          self.clock.stop(step)
          if reclusters:
            self._recluster(step)
          if rests:
            self._pause(step, signum)
          self.clock.start(step)

  def _reclusters_after(self, step: int) -> bool:
    return self.recluster is not None and self.experiment.recluster.is_due(step)

  def _recluster(self, step: int) -> None:
    self.state, row = self.recluster(self.state)
    self._write({"step": step, "recluster": row})

  def _is_due(self, step: int) -> bool:
    train = self.train
    return step % train.save_every == 0 or step % train.eval_every == 0 or step == train.steps

  def _read(self, step: int, metrics: dict) -> float:
    """Logs a step's metrics; stops the run where they are not finite."""
    values = {name: float(value) for name, value in jax.device_get(metrics).items()}
    wrong = {name: value for name, value in values.items() if not math.isfinite(value)}
    if wrong:
      self.checkpoints.wait()
      raise NotFiniteError(self._explain(step, wrong))
    if step % self.train.log_every == 0 or step == self.train.steps:
      self._write({"step": step, **values})
    self.loss = values["loss"]
    return self.loss

  def _write(self, row: dict) -> None:
    if self.log is not None:
      self.log.write(row)

  def _explain(self, step: int, wrong: dict) -> str:
    named = ", ".join(f"{name} is {value}" for name, value in wrong.items())
    last = self.checkpoints.latest
    kept = (
      "no checkpoint was saved yet" if last is None else f"checkpoint {last} is finite and kept"
    )
    return (
      f"{named} at step {step}; {kept} in {self.run.path}. Try a lower train.learning_rate or"
      " train.clip, or a longer train.warmup, in another run"
    )

  def _pause(self, step: int, signum: int | None) -> None:
    """Saves, with an evaluation where it is time for one; stops where a signal asks for it."""
    train, score = self.train, None
    if not all_finite(self.state.params):
      self.checkpoints.wait()
      raise NotFiniteError(self._explain(step, {"a parameter": "not finite"}))
    if step % train.eval_every == 0 or step == train.steps:
      score = self._score("valid").known()
      self._write({"step": step, "valid": score})
    # At every evaluation too: the best one must be on disk.
    position = {"data": self.batches.get_state(), "loss": self.loss, "clock": self.clock.state()}
    self.checkpoints.save(self.state, position, score)
    if signum:
      self.checkpoints.wait()
      raise Interrupted(signum, step)

  def _score(self, name: str):
    split = self.splits[name]
    loader = self.program.experiment.loader
    batches = loader.whole(split, batch=self.program.micro, context=self.model.context)
    scorer = lambda variables, batch: self.program.scorer(
      variables, self.program.place_whole(batch)
    )
    score = evaluate(scorer, self.state.variables, batches, loader.text_bytes(split))
    if not math.isfinite(score.nats_per_token):
      wrong = {f"the {name} loss": score.nats_per_token}
      raise NotFiniteError(self._explain(int(self.state.step), wrong))
    return score

  def _cost(self, head: Head) -> cost_of.Cost | None:
    """The cost of the head's loss on one device, for a device's share of the tokens, if it fits."""
    mesh = self.program.mesh.shape
    rows = self.program.micro // (mesh["data"] * mesh["fsdp"])
    try:
      return cost_of.loss_cost(head, rows * self.model.context)
    except JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      return None

  def _result(self) -> dict:
    seconds, steps = self.clock.seconds, self.clock.steps
    tokens = self.train.batch * self.model.context
    head = getattr(self.model, "head", None)  # a classifier has none
    embedding = getattr(self.model, "embedding", None)  # pictures have none
    # Process 0 alone writes the result.
    cost = self._cost(head) if head is not None and is_main() else None
    return {
      "valid": self._score("valid").known(),
      "test": self._score("test").known(),
      "head": head and _sized(head) | {"tied": getattr(head, "embedding", None) is not None},
      "embedding": embedding
      and _sized(embedding) | {"shipped_bytes": embedding.shipped().state_bytes},
      "model": _model_size(self.state),
      "mesh": dict(self.program.mesh.shape),
      "loss": cost and cost._asdict(),
      "train": {
        "steps": self.train.steps,
        "loss": self.loss,
        "seconds": seconds,
        "step_seconds": seconds / steps if steps else None,
        "tokens_per_second": steps * tokens / seconds if steps else None,
        "peak_memory_bytes": peak_memory_bytes(),
      },
    }


class _Clock:
  """Time and number of the steps between start and stop, without compiling, evaluating, saving."""

  def __init__(self, seconds: float = 0.0, steps: int = 0):
    self.seconds, self.steps = seconds, steps

  def start(self, step: int) -> None:
    self.began, self.first = time.perf_counter(), step

  def stop(self, step: int) -> None:
    self.seconds += time.perf_counter() - self.began
    self.steps += step - self.first

  def state(self) -> dict:
    return {"seconds": self.seconds, "steps": self.steps}


def _sized(layer: Head | Embedding) -> dict:
  return {"class": type(layer).__name__, **layer.size()._asdict()}


def _model_size(state: TrainState) -> dict:
  return {
    "params": sum(x.size for x in jax.tree.leaves(state.params)),
    "state_bytes": sum(x.nbytes for x in jax.tree.leaves(state.variables)),
  }
