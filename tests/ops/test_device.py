"""Tests of the limits that tiles are chosen by."""

import pytest

from vqjax.ops import device, tiles


def caches(folder, **sizes):
  for index, (level, size) in enumerate(sizes.items()):
    (folder / f"index{index}").mkdir(parents=True)
    (folder / f"index{index}" / "level").write_text(f"{level[1:]}\n")
    (folder / f"index{index}" / "size").write_text(f"{size}K\n")


@pytest.mark.parametrize("level3", [8 * 2**10, 32 * 2**10, 256 * 2**10])
def test_tiles_of_a_cpu_fit_the_caches_that_it_reports(tmp_path, monkeypatch, level3):
  caches(tmp_path, L1=48, L2=1024, L3=level3)
  monkeypatch.setattr(device, "_CACHES", tmp_path)
  device.of.cache_clear()
  try:
    alone, eighth = device.of("cpu"), device.of("cpu", devices=8)
  finally:
    device.of.cache_clear()
  assert 4 * alone.tokens * alone.vocab <= max(level3 * 2**10 / 12, 2**20)
  assert eighth.tokens * eighth.vocab <= alone.tokens * alone.vocab
  assert eighth.kept * 8 == alone.kept <= min(2**25, level3 * 2**7)


def test_a_machine_that_reports_no_caches_has_limits(tmp_path, monkeypatch):
  monkeypatch.setattr(device, "_CACHES", tmp_path / "absent")
  device.of.cache_clear()
  try:
    assert device.of("cpu").tokens == 512
  finally:
    device.of.cache_clear()


@pytest.mark.parametrize(
  ("kind", "tile"), [("TPU v5 lite", (4096, 4096)), ("TPU v5", (16384, 1024))]
)
def test_the_kind_of_a_tpu_decides_its_tile(kind, tile):
  assert device.of("tpu", kind)[:2] == tile
  assert device.of("tpu", "TPU of another year").fuses


def test_limits_are_overridden_inside_of_a_with():
  before = tiles.most_scores()
  with device.using(device.current()._replace(tokens=7, vocab=11)):
    assert tiles.most_scores() == 77
  assert tiles.most_scores() == before
