"""Prepare a dataset of TensorFlow Datasets without TensorFlow.

python -m vqjax.lab.data.build wikipedia/20230601.en --data_dir datasets

The command `tfds build` imports TensorFlow before it reads its arguments. Where TensorFlow is
installed, `tfds build NAME --file_format array_record` is equivalent.
"""

import sys

from vqjax.lab.data.corpus_files import import_extra

__all__ = []


def main(argv: list[str]) -> None:
  """Build the datasets that `argv` names, with all options of `tfds build`."""
  import_extra("tensorflow_datasets")
  from absl import app
  from tensorflow_datasets.scripts.cli import build, cli_utils

  if not any(argument.startswith("--file_format") for argument in argv):
    argv = [*argv, "--file_format=array_record"]  # which needs no TensorFlow to be read
  parser = cli_utils.make_flags_parser(build.Args, description=__doc__)
  app.run(lambda arguments: arguments.execute(), argv=argv, flags_parser=parser)


if __name__ == "__main__":
  main(sys.argv)
