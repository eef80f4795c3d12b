"""The training loop: from an experiment and a run folder to a result."""

import json
import math
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from vqjax.lab.config import Experiment, config_hash
from vqjax.lab.data.corpus_files import import_extra
from vqjax.lab.training import distributed
from vqjax.lab.training.checkpoint import Checkpoints
from vqjax.lab.training.distributed import DAY, is_main
from vqjax.lab.training.evaluate import Score, evaluate, loss_cost
from vqjax.lab.training.interrupt import Interrupted, agreed_signal, deferred_signals
from vqjax.lab.training.log import MetricsLog, progress_bar
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.provenance import peak_memory_bytes, provenance
from vqjax.lab.training.run_folder import EncodedText, RunFolder, load_text
from vqjax.lab.training.step import all_finite
from vqjax.lab.training.throughput import Throughput
from vqjax.sharding import make_mesh

__all__ = ["NotFiniteError", "fit"]


class NotFiniteError(ArithmeticError):
  """The loss, its gradient or a parameter is not a finite number, and the run stops."""

  exit_code = 1


def fit(
  experiment: Experiment,
  folder: str | os.PathLike,
  *,
  test: bool = True,
  source: Mapping[str, Any] | None = None,
  identified: Experiment | None = None,
) -> dict:
  """Train an experiment in its run folder, or resume it; return the result.

  A finished run returns its result at once. SIGINT, SIGTERM, SIGHUP and SIGQUIT finish the step,
  save and raise `Interrupted`. Of several processes each calls this function after
  `distributed.start`; a signal to one stops all after the same step. Process 0 writes, and all must
  share the folder.

  Args:
    experiment: the experiment.
    folder: its run folder.
    test: score the test split and time the loss at the end; a run that only chooses settings must
      not read that split.
    source: what the experiment was made from, such as {"config": its file, "overrides": [...]}, for
      commands that read the run; kept in a new folder, and not part of the run's identity.
    identified: the experiment that identifies the run, where `experiment` names folders that may
      move; None: `experiment`.

  Raises:
    ValueError: the folder belongs to another config; or the text, the tokenizer or a checkpoint
      does not fit the model. Nothing is overwritten.
    NotFiniteError: a loss, gradient or parameter is not finite; the last checkpoint is kept.
    OSError: the disk is full, or the folder cannot be written or is not shared.
    ImportError: the library of `train.tracker` is not installed.
  """
  folder, identified = pathlib.Path(folder), identified or experiment
  is_new, tracker = not (folder / "config.json").exists(), experiment.train.tracker
  if is_new and tracker and is_main():
    import_extra(tracker, tracker)  # before a long text is read and a folder is made
  distributed.agree("config", config_hash(identified))
  distributed.agree("train.mesh", str(experiment.train.mesh))
  text = distributed.main_first("text", lambda: load_text(experiment))
  distributed.agree("text", json.dumps(text.identity), patience=DAY)
  make_program = lambda: Program(text.experiment, make_mesh(experiment.train.mesh))
  # Made before a new folder is: a model that cannot be made must not leave one.
  program = None if (folder / "config.json").exists() else make_program()
  run = RunFolder(folder, identified, text.identity, source)
  try:
    result = run.result()
    if result is not None and result["status"] == "finished":
      return result
    # The hash of the config as written, before the vocabulary is filled in.
    identity = {"config_hash": config_hash(identified), "seed": experiment.seed}
    identity = {"name": experiment.name, **identity}
    try:
      outcome = _Training(text, run, program or make_program()).run_to_end(test)
    except NotFiniteError as error:
      run.write_result(identity | provenance() | {"status": "failed", "error": str(error)})
      raise
    run.write_result(identity | provenance() | {"status": "finished", **outcome})
    # Read back: of several processes only the first measures the cost of the loss.
    return run.result()
  finally:
    run.close()


class _Training:
  """The work of one process, from the newest checkpoint to the last step."""

  def __init__(self, text: EncodedText, run: RunFolder, program: Program):
    self.text, self.run, self.program = text, run, program
    self.experiment, self.splits = text.experiment, text.splits
    self.train, self.model = self.experiment.train, self.experiment.model
    self.tokens_per_step = self.train.batch * self.model.context
    self.batches = self.experiment.loader.batches(
      self.splits["train"],
      batch=self.train.batch,
      context=self.model.context,
      seed=self.experiment.seed,
      rows=program.rows,
    )
    recluster = self.experiment.recluster
    self.recluster = recluster and recluster.on(program, self.splits["train"])
    # Each save waits for the one before, so that the second one ends after the first.
    complete_by = 2 * self.train.save_every
    self.checkpoints = Checkpoints(run.path, self.train.keep, run.owner, complete_by)
    self.loss, self.clock, self.last_row = None, _Clock(), None
    self.valid: dict | None = None  # of the last step, once it is evaluated
    restored = self.checkpoints.restore(program.abstract_state)
    # A run that has a checkpoint does not read `init_from`, whose folder may be gone by now.
    if restored is not None:
      self.state, position = restored
      self.batches.set_state(position["data"])
      self.loss, self.clock = position["loss"], _Clock(**position["clock"])
      self.last_row = position["last_row"]
    else:
      init_key, _ = keys(self.experiment.seed)
      self.state = program.init(init_key)
      init_from = self.experiment.init_from
      if init_from is not None:
        self.state = program.begin(init_from(text, self.model, self.state.variables))
    # Where the state does not fit in memory, `int` alone would wait for ever: XLA reports it here.
    self.first_step = int(jax.block_until_ready(self.state).step)
    self.throughput = Throughput.of(program.model, self.state.params, program.mesh)

  def run_to_end(self, test: bool) -> dict:
    """Train the remaining steps, and return the measurements of the result."""
    self.log = None
    try:
      if is_main():
        path, tracker = self.run.path, self.train.tracker
        self.log = MetricsLog(path, self.first_step, self.last_row, tracker)
      self._train()
      self.checkpoints.wait()  # a folder with a result must have its last checkpoint
      return self._result(test)
    finally:
      if self.log is not None:
        self.log.close()
      self.checkpoints.close()

  def _train(self) -> None:
    train, name, first = self.train, self.experiment.name, self.first_step
    pending = None
    with (
      deferred_signals() as received_signal,
      progress_bar(name, first, train.steps, self.tokens_per_step, self.throughput) as report,
    ):
      for step in range(first + 1, train.steps + 1):
        batch = self.program.place(next(self.batches))
        self.state, metrics = self.program.step(self.state, batch)
        if step == first + 1:
          jax.block_until_ready(metrics)  # the first step compiles: the clock starts after it
          self.clock.start(step)
        # Read one step late: the device works on the next step while the host waits.
        if pending is not None:
          report(step - 1, self._read_metrics(*pending))
        pending = step, metrics
        # Of several processes none returns a signal of its own: all of them call `agreed_signal`.
        signum = received_signal() or agreed_signal(step)
        pauses = signum or step == train.steps
        pauses = pauses or step % train.save_every == 0 or step % train.eval_every == 0
        reclusters = self.recluster is not None and self.experiment.recluster.is_due(step)
        if pauses or reclusters:
          report(step, self._read_metrics(*pending))
          pending = None
          # The metrics are on the host, so that the device has finished the step.
          self.clock.stop(step)
          if reclusters:
            self.state, row = self.recluster(self.state)
            self._write({"step": step, "recluster": row})
          if pauses:
            self._evaluate_and_save(step, signum)
          self.clock.start(step)

  def _read_metrics(self, step: int, metrics: dict) -> float:
    """Log the metrics of a step and return its loss; raise where one is not finite."""
    values = {name: float(value) for name, value in jax.device_get(metrics).items()}
    wrong = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    if wrong:
      self._stop(step, ", ".join(wrong))
    if step % self.train.log_every == 0 or step == self.train.steps:
      self._write({"step": step, **values}, self._speed(step))
    self.loss = values["loss"]
    return self.loss

  def _speed(self, step: int) -> dict[str, float | None]:
    """Tokens and model FLOPs per second since the last logged step; {} before the clock runs."""
    rate = self.clock.steps_per_second(step)
    return {} if rate is None else self.throughput.numbers(rate * self.tokens_per_step)

  def _write(self, row: dict, speed: dict[str, float | None] | None = None) -> None:
    if self.log is not None:
      self.log.write(row, speed)

  def _stop(self, step: int, problem: str) -> None:
    """Wait for the last checkpoint, and raise NotFiniteError."""
    self.checkpoints.wait()  # the message names a complete checkpoint
    latest = self.checkpoints.latest
    kept = "no checkpoint was saved" if latest is None else f"checkpoint {latest} is kept"
    raise NotFiniteError(
      f"{problem} at step {step}; {kept} in {self.run.path}. Try a lower train.learning_rate or"
      " train.clip, or a longer train.warmup, in another run."
    )

  def _evaluate_and_save(self, step: int, signum: int | None) -> None:
    """Evaluate where it is due, save, and raise `Interrupted` where a signal came."""
    train, metrics = self.train, None
    # The metrics of a step come from the parameters before its update, which may have overflowed.
    if not all_finite(self.state.params):
      self._stop(step, "a parameter is not finite")
    if step % train.eval_every == 0 or step == train.steps:
      metrics = self._score("valid").numbers()
      self._write({"step": step, "valid": metrics})
      self.valid = metrics if step == train.steps else None
    position = {
      "data": self.batches.get_state(),
      "loss": self.loss,
      "clock": {"seconds": self.clock.seconds, "steps": self.clock.steps},
      "last_row": self.log.last if self.log is not None else "",
    }
    self.run.check()
    # Saved at every evaluation too, because the best checkpoint must be on disk.
    self.checkpoints.save(self.state, position, metrics)
    if signum:
      self.checkpoints.wait()  # the process ends soon, and the threads that write with it
      raise Interrupted(signum, step)

  def _score(self, name: str) -> Score:
    program, split = self.program, self.splits[name]
    loader = self.experiment.loader
    batches = loader.whole(split, batch=program.micro, context=self.model.context)
    placed = map(program.place_whole, batches)
    score = evaluate(program.scorer, self.state.variables, placed, loader.text_bytes(split))
    if not math.isfinite(score.nats_per_token):
      self._stop(int(self.state.step), f"the {name} loss is {score.nats_per_token}")
    return score

  def _result(self, test: bool) -> dict:
    seconds, steps = self.clock.seconds, self.clock.steps
    params, variables = jax.tree.leaves(self.state.params), jax.tree.leaves(self.state.variables)
    result = {
      # Scored again only where the process ended between the last checkpoint and the result.
      "valid": self.valid or self._score("valid").numbers(),
      "test": self._score("test").numbers() if test else None,
      "head": None,
      "embedding": None,
      "model": {
        "params": sum(x.size for x in params),
        "state_bytes": sum(x.nbytes for x in variables),
      },
      "mesh": dict(self.program.mesh.shape),
      "last_row": self.log.last if self.log is not None else "",
      "loss": None,
      "train": {
        "steps": self.train.steps,
        "loss": self.loss,
        "seconds": seconds,
        "step_seconds": seconds / steps if steps else None,
        "tokens_per_second": None,
        **(self.throughput.numbers(steps * self.tokens_per_step / seconds) if steps else {}),
        "model_flops_per_token": self.throughput.flops,
        "peak_memory_bytes": peak_memory_bytes(),
      },
    }
    head = getattr(self.model, "head", None)  # a classifier has no head
    if head is not None:
      tied = getattr(head, "embedding", None) is not None
      result["head"] = {"class": type(head).__name__, **head.size()._asdict(), "tied": tied}
      is_timed = test and is_main()  # only process 0 writes
      result["loss"] = self._loss_cost(head) if is_timed else None
    embedding = getattr(self.model, "embedding", None)  # a model of images has no embedding
    if embedding is not None:
      shipped = {"shipped_bytes": embedding.inference_size().state_bytes}
      name = type(embedding).__name__
      result["embedding"] = {"class": name, **embedding.size()._asdict(), **shipped}
    return result

  def _loss_cost(self, head) -> dict | None:
    """Return the cost of the head's loss on one device; None if it does not fit."""
    mesh = self.program.mesh.shape
    rows = self.program.micro // (mesh["data"] * mesh["fsdp"])
    try:
      return loss_cost(head, rows * self.model.context)._asdict()
    except JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      return None


class _Clock:
  """Seconds and number of the steps, without compiling, evaluating and saving."""

  def __init__(self, seconds: float = 0.0, steps: int = 0):
    self.seconds, self.steps = seconds, steps
    self.began = self.first = None
    self._read = seconds, steps

  def start(self, step: int) -> None:
    self.began, self.first = time.perf_counter(), step

  def stop(self, step: int) -> None:
    self.seconds += time.perf_counter() - self.began
    self.steps += step - self.first
    self.began = None

  def steps_per_second(self, step: int) -> float | None:
    """Rate since the last call, at a step that has just ended; None where no step was counted."""
    now = self.seconds, self.steps
    if self.began is not None:
      now = now[0] + time.perf_counter() - self.began, now[1] + step - self.first
    (seconds, steps), self._read = self._read, now
    counted = now[1] - steps
    return counted / (now[0] - seconds) if counted > 0 else None
