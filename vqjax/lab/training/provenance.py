"""Where a result comes from: commit, device, versions and date."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import resource
import subprocess
import sys

import jax

__all__ = ["commit", "commit_of", "device", "provenance"]

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "vqjax")
"""Packages whose versions a result records."""


def provenance() -> dict:
  """Return commit, device, versions and date, for the JSON of a result."""
  versions: dict[str, str | None] = {"python": platform.python_version()}
  for name in PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = None
  return {
    "commit": commit(),
    "device": device(),
    "versions": versions,
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
  }


def commit() -> str | None:
  """Return the commit of this checkout, as `commit_of` says; None outside."""
  root = pathlib.Path(__file__).resolve().parents[3]
  return commit_of(root) if (root / ".git").exists() else None


def commit_of(folder: pathlib.Path) -> str | None:
  """Return the commit of a folder's repository, with + for changed files; None outside of one."""
  git = ["git", "-C", str(folder)]
  try:
    head = subprocess.run(
      [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    # Results that other runs have written since, and the figures made of them, are not code.
    excluded = "*/results.jsonl", "docs/results/*", "docs/images/*"
    paths = [":/", *(f":(exclude,top){path}" for path in excluded)]
    different = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *paths], check=False)
    changed = different.returncode != 0
  except (OSError, subprocess.CalledProcessError):
    return None
  return head + ("+" if changed else "")


def device() -> str:
  """Return number, kind and platform of the devices; CPU cores for a CPU."""
  devices = jax.devices()
  if devices[0].platform == "cpu":
    # A batch system may give this process fewer cores than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()} CPU, {cores} cores"
  return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"


def peak_memory_bytes() -> int:
  """Return peak memory of the first accelerator if counted, else of the process."""
  stats = jax.local_devices()[0].memory_stats()
  if stats and "peak_bytes_in_use" in stats:
    return int(stats["peak_bytes_in_use"])
  unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB on Linux
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
