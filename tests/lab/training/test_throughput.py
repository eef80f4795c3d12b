"""Model FLOPs are those of a count by hand, and rates are shares of a peak."""

import io
import types

import jax
import numpy as np
import pytest
from rich.console import Console

from tests import jitted
from vqjax import CodebookHead, DenseEmbedding, DenseHead
from vqjax.lab import chips
from vqjax.lab.training import log
from vqjax.lab.training.throughput import Throughput, flops_per_token
from vqjax.lm.models import MLP, Attention, Transformer
from vqjax.ngrams import NGramEmbedding, NGramMemory
from vqjax.ops.ngrams import XorHash

V, D, L, H, T = 100, 16, 3, 2, 32


def decoder(head=None, **fields):
  return Transformer(DenseEmbedding(V, D), head or DenseHead(V, D), D, L, H, T, **fields)


def counted(model):
  tokens = np.zeros((1, 4), np.int32)
  shapes = jitted.abstract_variables(model, tokens, tokens, method="loss_terms")
  return flops_per_token(model, shapes["params"])


def test_flops_of_a_decoder_are_those_of_a_count_by_hand():
  # GPT-2's block: four projections and two layers of 4 D, with biases, and two norms.
  block = 4 * D * D + 4 * D + 2 * 4 * D * D + 5 * D + 2 * 2 * D
  body = L * block + 2 * D
  assert counted(decoder()) == 6 * body + 12 * L * D * T + 6 * V * D


def test_local_blocks_attend_to_their_window_and_heads_count_what_they_score():
  attention = Attention(head_dim=4, kv_heads=1, qkv_bias=False, out_bias=False)
  model = decoder(CodebookHead(V, D, 10), attention=attention, mlp=MLP(8, use_bias=False), window=8)
  # 2 heads of queries and one of keys and values; every second of three blocks is local.
  block = D * 8 + 2 * D * 4 + 8 * D + 2 * D * 8 + 2 * 2 * D
  forward = 2 * (L * block + 2 * D) + 4 * 8 * (T + 8 + T)
  assert counted(model) == 3 * (forward + CodebookHead(V, D, 10).flops_per_token())


def test_rows_of_n_grams_are_looked_up():
  counts = []
  for least in (50, 500):
    ngrams = XorHash.qwen4(V, end=0, heads=2, least=least)
    memory = NGramMemory(NGramEmbedding(ngrams, DenseEmbedding(ngrams.rows, 8)), D)
    counts.append(counted(decoder(memories=(memory,), memory_blocks=(1,))))
  assert counts == 2 * [counted(decoder()) + 3 * memory.flops_per_token()]


def test_a_model_of_another_kind_is_not_counted():
  assert flops_per_token(object(), {}) is None


@pytest.mark.parametrize(
  ("kind", "name"),
  [
    ("NVIDIA H100 80GB HBM3", "H100 SXM"),
    ("NVIDIA H100 PCIe", None),
    ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
    ("TPU v5 lite", "TPU v5e"),
    ("TPU v5p", "TPU v5p"),
    ("TPU v6 lite", "TPU v6e"),
    ("cpu", None),
  ],
)
def test_a_chip_is_known_by_the_name_that_jax_gives_it(kind, name):
  found = chips.of_kind(kind)
  assert (found and found.name) == name


def test_rates_are_shares_of_the_peak_where_it_is_known():
  known = Throughput(flops=10**9, peak=1e14)
  assert known.numbers(5e4) == {
    "tokens_per_second": 5e4,
    "model_flops_per_second": 5e13,
    "mfu": 0.5,
  }
  assert known.text(5e4) == "50,000 tokens/s, 50 TFLOP/s, 50.0 % of the peak"
  assert Throughput(10**9).text(5e4) == "50,000 tokens/s, 50 TFLOP/s"
  assert Throughput().text(5e4) == "50,000 tokens/s"
  assert Throughput().numbers(1.0)["mfu"] is None


def test_this_machine_has_no_known_peak():
  mesh = jax.make_mesh((1,), ("data",))
  assert Throughput.of(None, {}, mesh) == Throughput()


def test_the_seconds_left_do_not_count_the_compilation_in_the_first_step(monkeypatch):
  seconds, stream = iter([0.0, 100.0, 102.0]), io.StringIO()
  monkeypatch.setattr(log, "time", types.SimpleNamespace(perf_counter=lambda: next(seconds)))
  with log.progress_bar("a", 0, 20, 8, Throughput(), Console(file=stream)) as report:
    report(1, 3.0)
    report(2, 2.5)
  assert stream.getvalue() == "a  step 2/20  4 tokens/s  loss 2.500  36 s left\n"
