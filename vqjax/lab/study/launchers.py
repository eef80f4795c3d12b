"""Where the jobs of a study run: in this process, on a Ray cluster, or under SLURM.

Each job is a process of its own on one device, which writes its result into the study's folder; all
machines see that folder. What runs when is up to Ray and SLURM, which know what each job needs.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from vqjax.lab import exits
from vqjax.lab.data.corpus_files import import_extra
from vqjax.lab.study.declaration import load_study
from vqjax.lab.study.jobs import StudyJob
from vqjax.lab.study.work import Work

__all__ = ["LAUNCHERS", "RemoteJob"]

PASSED = "VQJAX_", "JAX_", "XLA_", "PYTHONPATH"
"""Beginnings of the variables of the environment that workers of Ray get."""

DAY = 24 * 60
"""Minutes that a SLURM job may take, unless `timeout_min` says otherwise."""


@dataclasses.dataclass(frozen=True)
class RemoteJob:
  """A job of a study, for another process.

  Attributes:
    file: the file that declares the study.
    folder: the folder of its results.
    scale: how often its steps are trained.
    name: the job.
    directory: the working directory, from which paths are.
    function: the function of the file that returns the study.
  """

  file: pathlib.Path
  folder: pathlib.Path
  scale: Fraction
  name: str
  directory: str
  function: str = "study"

  def __call__(self) -> None:
    """Make the result of the job and keep it."""
    os.chdir(self.directory)
    study = load_study(self.file, self.function)
    work = Work(study, self.folder, self.file, self.scale, self.function)
    jobs = work.job_list()
    for job in jobs.jobs:
      if job.name == self.name:
        return jobs.do(job)
    # A trial, of which nothing is kept but its run.
    tuning = [job for job in jobs.jobs if self.name.startswith(f"{job.name}-")]
    trial = next(job for job in work.in_parts(tuning) if job.name == self.name)
    if not jobs.lacks(trial):
      trial.make()

  @staticmethod
  def of(work: Work, job: StudyJob) -> "RemoteJob":
    """A job of a study whose paths are from the current directory."""
    here = str(pathlib.Path.cwd())
    return RemoteJob(work.file, work.folder, work.scale, job.name, here, work.function)


def on_ray(work: Work, jobs: Sequence[StudyJob]) -> None:
  """Run jobs on the cluster at RAY_ADDRESS, or on one that starts on this machine.

  A job takes one GPU, or all cores of a machine where no machine has a GPU.
  """
  ray = import_extra("ray", "ray")
  if not ray.is_initialized():
    passed = {key: value for key, value in os.environ.items() if key.startswith(PASSED)}
    ray.init(runtime_env={"env_vars": passed}, include_dashboard=False)
  if ray.cluster_resources().get("GPU"):
    device = {"num_gpus": 1}
  else:
    cores = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    device = {"num_cpus": min(count for count in cores if count)}
  # A process for each job: it gives the device's memory back, and a failed job is not repeated.
  task = ray.remote(max_calls=1, max_retries=0, **device)(_after)
  made: dict[str, Any] = {}
  for job in jobs:
    before = [made[name] for name in job.needs if name in made]
    made[job.name] = task.remote(RemoteJob.of(work, job), *before)
  names = {result: name for name, result in made.items()}
  left = [*names]
  while left:
    (ended,), left = ray.wait(left)
    ray.get(ended)
    exits.say(f"{names[ended]} has ended; {len(left)} left")


def _after(job: RemoteJob, *before: None) -> None:
  """Run a job once those before it have ended, for which Ray waits."""
  del before
  job()


def on_slurm(work: Work, jobs: Sequence[StudyJob], **parameters: str) -> None:
  """Submit jobs to SLURM by submitit, each after those that it needs, and wait for them.

  Args:
    work: the study.
    jobs: what is run.
    parameters: parameters of submitit's executor as texts, such as {"slurm_partition": "gpu"};
      "cluster" may be "local" or "debug", which need no SLURM.
  """
  submitit = import_extra("submitit", "slurm")
  values: dict[str, Any] = {k: int(v) if v.isdigit() else v for k, v in parameters.items()}
  cluster = values.pop("cluster", "slurm")
  executor = submitit.AutoExecutor(folder=work.folder / "slurm", cluster=cluster)
  executor.update_parameters(**{"timeout_min": DAY, "tasks_per_node": 1, **values})
  made: dict[str, Any] = {}
  for job in jobs:
    before = [made[name] for name in job.needs if name in made]
    if cluster == "slurm":
      ids = ":".join(each.job_id for each in before)
      after = {"dependency": f"afterany:{ids}"} if before else {}
      executor.update_parameters(slurm_additional_parameters=after)
    else:
      for each in before:
        each.result()
    made[job.name] = executor.submit(RemoteJob.of(work, job))
  for name, each in made.items():
    each.result()
    exits.say(f"{name} has ended")


Launcher = Callable[..., None]
"""(study, jobs that are missing, **parameters) -> None, once all of them have ended."""

LAUNCHERS: dict[str, Launcher | None] = {"local": None, "ray": on_ray, "slurm": on_slurm}
"""Names of launchers; None: in this process, one job after another."""
