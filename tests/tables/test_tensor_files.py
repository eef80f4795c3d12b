"""Files of a folder are read as transformers reads them."""

import json

import numpy as np
import pytest

from vqjax.tables.tensor_files import open_rows, save_file


def test_shards_of_an_earlier_save_are_not_read(tmp_path):
  files = ["model-00001-of-00001.safetensors", "model-00002-of-00002.safetensors"]
  for number, name in enumerate(files):
    save_file({"n.weight": np.full((3, 2), number, np.float32)}, tmp_path / name)
  with pytest.raises(
    ValueError, match=r"must hold n.weight once.*00001-of.* Give one of the files"
  ):
    open_rows(tmp_path, "n.weight")
  index = tmp_path / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": {"n.weight": files[0]}}))
  np.testing.assert_array_equal(open_rows(tmp_path, "n.weight"), 0)
  save_file({"n.weight": np.full((3, 2), 5, np.float32)}, tmp_path / "model.safetensors")
  with pytest.warns(UserWarning, match="is read, as by transformers"):
    np.testing.assert_array_equal(open_rows(tmp_path, "n.weight"), 5)
