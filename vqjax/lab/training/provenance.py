"""From which code, on which device and with which versions does a result come?"""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import resource
import subprocess
import sys

import jax


def provenance() -> dict:
  """Commit, device, versions and date, for a result's JSON."""
  return {
    "commit": commit(),
    "device": device(),
    "versions": {"python": platform.python_version(), **_versions()},
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
  }


def commit() -> str | None:
  """Commit of the checkout this package runs from, with + where it is changed; None outside one."""
  root = pathlib.Path(__file__).resolve().parents[2]
  if not (root / ".git").exists():
    return None
  git = ["git", "-C", str(root)]
  try:
    head = subprocess.run(
      [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode != 0
  except (OSError, subprocess.CalledProcessError):
    return None
  return head + ("+" if changed else "")


def device() -> str:
  """Number, kind and platform of the devices; a CPU with the cores that this process may use."""
  devices = jax.devices()
  kind = devices[0].device_kind
  if devices[0].platform == "cpu":
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()} CPU, {cores} cores"
  return f"{len(devices)} x {kind} ({devices[0].platform})"


def peak_memory_bytes() -> int:
  """Most memory in use so far: of the first accelerator where it counts it, else of the process."""
  stats = jax.local_devices()[0].memory_stats()
  if stats and "peak_bytes_in_use" in stats:
    return int(stats["peak_bytes_in_use"])
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _versions() -> dict:
  names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "vqjax")
  found = {}
  for name in names:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = None
  return found
