"""The benchmarks by name."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import lazy_loader

# Imported at first use: the GPU benchmark also runs where the lab's packages are not installed.
catalogues = lazy_loader.load("experiments.bench.catalogues", suppress_warning=True)
codebook = lazy_loader.load("experiments.bench.codebook", suppress_warning=True)
compared = lazy_loader.load("experiments.bench.compared", suppress_warning=True)
decoding = lazy_loader.load("experiments.bench.decoding", suppress_warning=True)
dpq = lazy_loader.load("experiments.bench.dpq", suppress_warning=True)
gemma = lazy_loader.load("experiments.bench.gemma", suppress_warning=True)
generation = lazy_loader.load("experiments.bench.generation", suppress_warning=True)
gpu = lazy_loader.load("experiments.bench.gpu", suppress_warning=True)
gradients = lazy_loader.load("experiments.bench.gradients", suppress_warning=True)
grouped = lazy_loader.load("experiments.bench.grouped", suppress_warning=True)
heads = lazy_loader.load("experiments.bench.heads", suppress_warning=True)
kmeans = lazy_loader.load("experiments.bench.kmeans", suppress_warning=True)
loop = lazy_loader.load("experiments.bench.loop", suppress_warning=True)
medusa = lazy_loader.load("experiments.bench.medusa", suppress_warning=True)
ngrams = lazy_loader.load("experiments.bench.ngrams", suppress_warning=True)
pages = lazy_loader.load("experiments.bench.pages", suppress_warning=True)
softmax = lazy_loader.load("experiments.bench.softmax", suppress_warning=True)
starts = lazy_loader.load("experiments.bench.starts", suppress_warning=True)
speculation = lazy_loader.load("experiments.bench.speculation", suppress_warning=True)


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """A benchmark.

  Attributes:
    description: what it measures, in a line.
    run: (quick) -> all figures so far, after each part; `quick` selects tiny sizes.
    is_default: whether it runs when no benchmark is named.
  """

  description: str
  run: Callable[[bool], Iterator[dict[str, Any]]]
  is_default: bool = False


BENCHMARKS = {
  "softmax": Benchmark(
    "the tiled softmax against materialised logits: time, memory, error",
    lambda quick: softmax.speed_and_error(quick),
    is_default=True,
  ),
  "budgets": Benchmark(
    "losses in 64 and 100 MiB, with and without masked tokens; two minutes",
    lambda quick: softmax.budgets(quick),
  ),
  "options": Benchmark(
    "each option of the tiled softmax against the plain loss",
    lambda quick: softmax.options(quick),
    is_default=True,
  ),
  "memory": Benchmark(
    "temporaries of large losses, compiled for one device and for eight",
    lambda quick: softmax.memory(quick),
    is_default=True,
  ),
  "gradients": Benchmark(
    "gradients of nearly certain tokens against float64, as each kind of device computes them",
    lambda quick: gradients.run(quick),
  ),
  "heads": Benchmark(
    "compressed heads against a dense softmax", lambda quick: heads.run(quick), is_default=True
  ),
  "loop": Benchmark(
    "the training loop against its bare step", lambda quick: loop.run(quick), is_default=True
  ),
  "starts": Benchmark(
    "nats of heads that begin at the default, at frequencies and at a text; ten minutes",
    lambda quick: starts.run(quick),
  ),
  "kmeans": Benchmark(
    "k-means against scikit-learn's Lloyd, half an hour", lambda quick: kmeans.run(quick)
  ),
  "codebook": Benchmark(
    "heads at the sizes of VQ-Logits' Table 3: log-probabilities and training; half an hour",
    lambda quick: codebook.run(quick),
  ),
  "whole-models": Benchmark(
    "whole models of VQ-Logits' Tables 1, 9 and 10: parameters and log-probabilities; ten minutes",
    lambda quick: codebook.whole(quick),
  ),
  "decoding": Benchmark(
    "top-k and samples of heads against the plain product with the weight; three minutes",
    lambda quick: decoding.run(quick),
  ),
  "compared": Benchmark(
    "training and decoding steps of the heads of the comparison; eight minutes",
    lambda quick: compared.run(quick),
  ),
  "generation": Benchmark(
    "greedy generation against its bare step, called token by token; a minute",
    lambda quick: generation.run(quick),
  ),
  "gemma": Benchmark(
    "generation of Gemma 3 270M beside llama.cpp and transformers; three minutes",
    lambda quick: gemma.generating(quick),
  ),
  "gemma-loading": Benchmark(
    "loading of Gemma 3 270M beside reading its files; a minute",
    lambda quick: gemma.loading(quick),
  ),
  "speculation": Benchmark(
    "heads of a drafter of Gemma 3 270M, in and off its domain; an hour, more the first time",
    lambda quick: speculation.run(quick),
  ),
  "speculation-run": Benchmark(
    "heads of a drafter of a decoder that is trained here; half an hour",
    lambda quick: speculation.of_run(quick),
  ),
  "speculation-long": Benchmark(
    "long continuations off a drafter's domain; a quarter of an hour",
    lambda quick: speculation.long(quick),
  ),
  "medusa": Benchmark(
    "tokens a pass of Gemma 3 270M with Medusa's blocks trained on stories; twenty minutes",
    lambda quick: medusa.run(quick),
  ),
  "catalogues": Benchmark(
    "memory of every head for a million items with Zipf counts; a quarter of an hour",
    lambda quick: catalogues.run(quick),
  ),
  "pages": Benchmark(
    "a table of 2^25 n-grams in pages: compression, lookups beside int8; a quarter of an hour",
    lambda quick: pages.run(quick),
  ),
  "dpq": Benchmark(
    "DPQ: training steps over K and M, lookup, export; a quarter of an hour",
    lambda quick: dpq.run(quick),
  ),
  "grouped-loss": Benchmark(
    "loss and gradient of the grouped head", lambda quick: grouped.loss(quick)
  ),
  "grouped-steps": Benchmark(
    "training steps of the grouped paper's Tables 2 and 3; a quarter of an hour",
    lambda quick: grouped.steps(quick),
  ),
  "grouped-sizes": Benchmark(
    "memory by group size (the grouped paper's Figure 3), compiled only",
    lambda quick: grouped.sizes(quick),
  ),
  "grouped-images": Benchmark(
    "drawing a batch of images against the step that learns from it",
    lambda quick: grouped.images(quick),
  ),
  "ngrams": Benchmark(
    "tables of 10^8 n-grams: training on disk (14 GB) and on devices, lookups; ten minutes",
    lambda quick: ngrams.run(quick),
  ),
  "gpu": Benchmark(
    "losses of large vocabularies on a GPU against PyTorch peers", lambda quick: gpu.run(quick)
  ),
  "gpu-plan": Benchmark(
    "temporaries of these losses, compiled for an H100 that is not there; two minutes",
    lambda quick: gpu.plan(quick),
  ),
  "gpu-decoding": Benchmark(
    "decoding steps on a GPU: dense, certified and compressed heads; some minutes",
    lambda quick: gpu.decoding(quick),
  ),
}
