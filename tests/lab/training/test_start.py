"""May a run begin with another's parameters, and is a wrong beginning refused?"""

import dataclasses
import json

import jax
import numpy as np
import pytest

from vqjax.lab.config import config_hash, describe
from vqjax.lab.training import fit
from vqjax.lab.training.checkpoint import (
  Checkpoints,
  FromPart,
  FromRun,
  read_variables,
  saved_steps,
)
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.run import load_text, write_json
from vqjax.sharding import MeshShape, make_mesh


@dataclasses.dataclass(frozen=True)
class Changed:
  """The fresh variables with a change made to the head's."""

  change: str

  def __call__(self, text, model, variables):
    head = dict(variables["params"]["head"])
    wide = np.zeros((9, 16), np.float32)
    codebook = head.pop("codebook")
    head |= {
      "twice": {"codebook": 2 * codebook},
      "renamed": {"codes": codebook},
      "reshaped": {"codebook": wide},
      "recast": {"codebook": codebook.astype("bfloat16")},
      "nan": {"codebook": codebook.at[3, 2].set(np.nan)},
    }[self.change]
    return variables | {"params": variables["params"] | {"head": head}}


def with_start(experiment, start, **train):
  settings = dataclasses.replace(experiment.train, **train)
  return dataclasses.replace(experiment, init_from=start, train=settings)


def program_of(experiment, *mesh):
  return Program(load_text(experiment).experiment, make_mesh(MeshShape(*(mesh or (1, 1, 1)))))


@pytest.fixture
def trained(experiment, tmp_path):
  """A folder with checkpoints 10 and 20, the first of which is better, as a run leaves them."""
  on = program_of(experiment)
  state = on.init(keys(0)[0])
  checkpoints = Checkpoints(tmp_path / "trained", keep=2)
  for step, nats in ((10, 1.0), (20, 2.0)):
    state = state.replace(
      step=jax.numpy.int32(step), params=jax.tree.map(lambda x: x + 1, state.params)
    )
    checkpoints.save(state, {}, {"nats_per_token": nats})
  checkpoints.close()
  identity = load_text(experiment).identity
  write_json(tmp_path / "trained" / "config.json", {"data": identity})
  return tmp_path / "trained"


def test_the_newest_or_the_best_variables_of_a_folder_are_read_without_its_model(
  experiment, trained
):
  fresh = jax.device_get(program_of(experiment).init(keys(0)[0]).variables)
  for best, number, more in ((False, 20, 2), (True, 10, 1)):
    found, step = read_variables(trained, best)
    assert step == number
    assert found.keys() == {"params", "codes"}
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(found))
    by_steps = jax.tree.map(lambda x: x + 1, fresh["params"])
    expected = by_steps if more == 1 else jax.tree.map(lambda x: x + 1, by_steps)
    jax.tree.map(np.testing.assert_array_equal, found["params"], expected)
    jax.tree.map(np.testing.assert_array_equal, found["codes"], fresh["codes"])


def test_a_damaged_checkpoint_is_passed_over_and_left_where_it_is(trained):
  newest = trained / "checkpoints" / "20"
  largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 1
  largest.write_bytes(content)
  with pytest.warns(UserWarning, match="checkpoint 20 .* is damaged"):
    assert read_variables(trained)[1] == 10
  assert newest.is_dir()


def test_the_best_checkpoint_stays_when_a_run_goes_on(experiment, trained):
  checkpoints = Checkpoints(trained, keep=1)
  state = program_of(experiment).init(keys(0)[0])
  checkpoints.save(state.replace(step=state.step + 30), {})
  checkpoints.close()
  assert read_variables(trained, best=True)[1] == 10
  assert read_variables(trained)[1] == 30


def test_a_folder_without_checkpoints_is_an_error(tmp_path):
  for folder in (tmp_path, tmp_path / "absent"):
    with pytest.raises(FileNotFoundError, match="must be a run folder with checkpoints; got"):
      read_variables(folder)
  (tmp_path / "checkpoints").mkdir()
  for best, kind in ((False, "complete"), (True, "evaluated")):
    with pytest.raises(FileNotFoundError, match=f"no {kind} checkpoint"):
      read_variables(tmp_path, best)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_a_state_begins_with_the_given_variables_in_their_places(experiment, trained, mesh):
  on = program_of(experiment, *mesh)
  variables, _ = read_variables(trained)
  state = on.begin(variables)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.variables), variables)
  assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, state, on.abstract_state))
  assert int(state.step) == 0


def test_a_run_starts_from_another_only_where_it_has_no_checkpoint_yet(
  experiment, trained, tmp_path
):
  still = {"learning_rate": 1e-30, "warmup": 0, "steps": 2}
  begun = with_start(experiment, FromRun(str(trained)), **still)
  fit(begun, tmp_path / "run")
  expected = read_variables(trained)[0]
  jax.tree.map(np.testing.assert_array_equal, read_variables(tmp_path / "run")[0], expected)
  (tmp_path / "run" / "result.json").unlink()
  (trained / "config.json").unlink()  # a second start would miss it
  assert fit(begun, tmp_path / "run")["status"] == "finished"


def test_another_tokenizer_is_refused(experiment, trained, tmp_path):
  config = json.loads((trained / "config.json").read_text())
  config["data"]["tokenizer"] = "other"
  write_json(trained / "config.json", config)
  with pytest.raises(ValueError, match="has another tokenizer: other there"):
    fit(with_start(experiment, FromRun(str(trained))), tmp_path / "run")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ("renamed", "params.head.codebook: absent given, float32"),
    ("reshaped", r"codebook: float32\[9, 16\] given, float32\[8, 16\] in this model"),
    ("recast", r"codebook: bfloat16\[8, 16\] given, float32\[8, 16\]"),
    ("nan", "finite numbers; got others in head.codebook"),
  ],
)
def test_variables_that_do_not_fit_are_refused_by_name(experiment, change, message):
  on = program_of(experiment)
  fresh = on.init(keys(0)[0]).variables
  with pytest.raises(ValueError, match=message):
    on.begin(Changed(change)(None, None, fresh))


def test_arrays_that_are_the_models_own_may_be_given_back(experiment):
  on = program_of(experiment)
  fresh = on.init(keys(0)[0])
  state = on.begin(Changed("twice")(None, None, fresh.variables))
  batch = np.zeros((4, 8), np.int32)
  state, _ = on.step(state, on.place({"inputs": batch, "targets": batch}))
  assert int(state.step) == 1
  assert np.isfinite(jax.device_get(fresh.params["head"]["codebook"])).all()


def test_the_start_is_part_of_what_an_experiment_is(experiment):
  begun = with_start(experiment, FromRun("runs/a"))
  assert describe(begun)["init_from"]["folder"] == "runs/a"
  hashes = {config_hash(e) for e in (experiment, begun, with_start(begun, FromRun("runs/b")))}
  assert len(hashes) == 3


def test_checkpoints_are_read_by_their_steps(trained):
  steps = saved_steps(trained)
  assert steps == sorted(steps)
  for step in steps:
    assert read_variables(trained, at=step)[1] == step
  with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 7"):
    read_variables(trained, at=7)
  assert saved_steps(trained / "nowhere") == []


def test_a_run_may_begin_with_a_part_of_another(experiment, trained, tmp_path):
  other = read_variables(trained)[0]["params"]
  part = dataclasses.replace(experiment, init_from=FromPart(str(trained), "blocks"))
  text = load_text(part)
  init_key, _ = keys(experiment.seed)
  fresh = program_of(experiment).init(init_key).variables
  begun = part.init_from(text, text.experiment.model, fresh)
  jax.tree.map(np.testing.assert_array_equal, begun["params"]["blocks"], other["blocks"])
  kept = {name: tree for name, tree in begun["params"].items() if name != "blocks"}
  jax.tree.map(np.testing.assert_array_equal, kept, {name: fresh["params"][name] for name in kept})
  with pytest.raises(ValueError, match=r"`part` must be one of .*; got 'encoder'"):
    FromPart(str(trained), "encoder")(text, text.experiment.model, fresh)
