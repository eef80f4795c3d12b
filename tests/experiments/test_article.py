"""Configurations have the published sizes, and the page has the tables that the command renders."""

import pytest

from experiments import article

# Numbers of parameters in the headers of the released safetensors files.
RELEASED = {
  "GPT-2": 124_439_808,
  "Llama 2 7B": 6_738_415_616,
  "Llama 3.2 1B": 1_235_814_400,
  "Llama 3 8B": 8_030_261_248,
  "Llama 3 70B": 70_553_706_496,
  "Llama 3.1 405B": 405_853_388_800,
  "Mistral 7B": 7_241_732_096,
  "Mixtral 8x7B": 46_702_792_704,
  "Gemma 2B": 2_506_172_416,
  "Gemma 7B": 8_537_680_896,
  "Qwen 3 0.6B": 596_049_920,
  "Qwen 3 8B": 8_190_735_360,
  "Qwen 3 32B": 32_762_123_264,
  "Gemma 3 270M": 268_098_176,
  "Gemma 3 1B": 999_885_952,
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_configuration_has_the_parameters_of_the_release(name):
  assert article.MODELS[name].parameters == RELEASED[name]


def test_a_configuration_has_the_rounded_parameters_of_its_report():
  assert article.MODELS["PaLM 540B"].parameters == pytest.approx(540.35e9, rel=1e-3)
  # arXiv 2005.14165, Table D.1.
  assert article.MODELS["GPT-3 175B"].parameters == pytest.approx(174_600e6, rel=1e-3)
  # arXiv 2503.19786, Table 1, without the table and the vision encoder.
  for name, millions in {"Gemma 3 4B": 3_209, "Gemma 3 27B": 25_600}.items():
    model = article.MODELS[name]
    assert model.parameters - model.table == pytest.approx(millions * 1e6, rel=1e-3)


def test_a_claim_holds_to_its_last_digit_or_within_three_percent():
  claim = lambda printed, value: article.Claim("", printed, value, "").holds
  assert claim("~3 layers", 2.5)
  assert not claim("~3 layers", 2.4)
  assert claim("1,049 M", 1_050.7)
  assert not claim("400 GFLOP", 0.4)
