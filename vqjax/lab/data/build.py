"""How is a dataset prepared where TensorFlow is not installed?

The command `tfds build` imports TensorFlow before it reads its arguments. This is the same command
without that: `python -m vqjax.lab.data.build vqjax_penn_treebank --manual_dir ptb --data_dir datasets`.
With TensorFlow, `tfds build vqjax_penn_treebank --imports vqjax.lab.data.builders --file_format
array_record` does the same.
"""

import sys

from absl import app
from tensorflow_datasets.scripts.cli import build, cli_utils

DEFAULTS = {"--imports": "vqjax.lab.data.builders", "--file_format": "array_record"}
"""What an argument is where none is given: our datasets, in a format that needs no TensorFlow."""


def main(argv: list[str]) -> None:
  """Builds the datasets that `argv` names, with all options of `tfds build`."""
  given = {argument.split("=")[0] for argument in argv}
  added = [f"{name}={value}" for name, value in DEFAULTS.items() if name not in given]
  parser = cli_utils.make_flags_parser(build.Args, description=__doc__)
  app.run(lambda arguments: arguments.execute(), argv=[*argv, *added], flags_parser=parser)


if __name__ == "__main__":
  main(sys.argv)
