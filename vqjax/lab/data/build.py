"""Prepare a dataset of `builders` without TensorFlow.

python -m vqjax.lab.data.build vqjax_penn_treebank --manual_dir ptb --data_dir datasets

The command `tfds build` imports TensorFlow before it reads its arguments. Where TensorFlow is
installed, `tfds build vqjax_penn_treebank --imports vqjax.lab.data.builders --file_format
array_record` is equivalent.
"""

import sys

from vqjax.lab.data.files import import_extra

DEFAULTS = {"--imports": "vqjax.lab.data.builders", "--file_format": "array_record"}
"""Defaults of arguments: the datasets of `builders`, in a format that needs no TensorFlow."""


def main(argv: list[str]) -> None:
  """Build the datasets that `argv` names, with all options of `tfds build`."""
  import_extra("tensorflow_datasets")
  from absl import app
  from tensorflow_datasets.scripts.cli import build, cli_utils

  given = {argument.split("=")[0] for argument in argv}
  added = [f"{name}={value}" for name, value in DEFAULTS.items() if name not in given]
  parser = cli_utils.make_flags_parser(build.Args, description=__doc__)
  app.run(lambda arguments: arguments.execute(), argv=[*argv, *added], flags_parser=parser)


if __name__ == "__main__":
  main(sys.argv)
