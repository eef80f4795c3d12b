"""Tests of outputs: what is at a path before, and what is there after."""

import os
import pathlib
import stat
import subprocess
import sys
import threading

import pytest

from vqjax import outputs


def write(path):
  outputs.write_text(path, "new", "--page")


def test_a_file_is_old_or_new_and_readable_as_others_are(tmp_path):
  (tmp_path / "other").touch()
  outputs.write_text(tmp_path / "text", "old")

  def fail(open_output):
    with open_output(tmp_path / "text") as file:
      path = file if open_output is outputs.atomic_path else pathlib.Path(file.name)
      path.write_bytes(b"n")
      raise ZeroDivisionError

  for open_output in (outputs.atomic_file, outputs.atomic_path):
    with pytest.raises(ZeroDivisionError):
      fail(open_output)
  assert (tmp_path / "text").read_text() == "old"
  assert (tmp_path / "text").stat().st_mode == (tmp_path / "other").stat().st_mode
  assert {*os.listdir(tmp_path)} == {"text", "other"}


def test_a_file_that_is_replaced_keeps_who_may_read_it(tmp_path):
  (tmp_path / "text").write_text("old")
  (tmp_path / "text").chmod(0o640)
  write(tmp_path / "text")
  assert stat.S_IMODE((tmp_path / "text").stat().st_mode) == 0o640


def test_a_link_stays_and_its_file_is_written(tmp_path):
  (tmp_path / "folder").mkdir()
  (tmp_path / "folder" / "old").write_text("old")
  for name, target in {"link": "folder/old", "twice": "link", "dangling": "folder/none"}.items():
    (tmp_path / name).symlink_to(target)
    write(tmp_path / name)
    assert (tmp_path / name).is_symlink()
    assert (tmp_path / name).read_text() == "new"
  assert {*os.listdir(tmp_path / "folder")} == {"old", "none"}
  (tmp_path / "circle").symlink_to("circle")
  with pytest.raises(OSError, match=r"`--page` must lead to a file; got .*circle"):
    write(tmp_path / "circle")


@pytest.mark.parametrize("open_output", [outputs.atomic_file, outputs.atomic_path])
def test_a_pipe_gets_what_is_written_and_stays(tmp_path, open_output):
  pipe, found = tmp_path / "pipe", []
  os.mkfifo(pipe)
  reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
  reader.start()
  with open_output(pipe) as file:
    file.write(b"new") if open_output is outputs.atomic_file else file.write_bytes(b"new")
  reader.join(10)
  assert found == [b"new"]
  assert stat.S_ISFIFO(pipe.stat().st_mode)
  assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("path", ["/dev/stdout", "/proc/self/fd/1", "/dev/fd/1", "link"])
@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_standard_output_gets_the_text_where_the_shell_has_put_it(tmp_path, path, kind):
  (tmp_path / "link").symlink_to("/dev/stdout")
  code = "from vqjax import outputs; print('a'); outputs.write_text({!r}, 'b\\n'); print('c')"
  call = [sys.executable, "-c", code.format(path)]
  env = os.environ | {"PYTHONPATH": os.getcwd()}
  if kind == "pipe":
    assert subprocess.check_output(call, cwd=tmp_path, env=env) == b"a\nb\nc\n"
    return
  with open(tmp_path / "out", "wb") as out:
    subprocess.run(call, cwd=tmp_path, env=env, stdout=out, check=True)
  assert (tmp_path / "out").read_bytes() == b"a\nb\nc\n"
  assert {*os.listdir(tmp_path)} == {"link", "out"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's devices")
def test_a_device_is_written_into(tmp_path):
  (tmp_path / "link").symlink_to("/dev/full")
  for path in ("/dev/full", tmp_path / "link"):
    with pytest.raises(OSError, match="No space left"):
      write(path)
    assert stat.S_ISCHR(os.stat(path).st_mode)
  write("/dev/null")
  with pytest.raises(FileExistsError, match="must be new; got /dev/null, which exists as a device"):
    outputs.check_output("/dev/null", folder=False)


def test_a_folder_is_refused_for_a_file_and_stays(tmp_path):
  for path in (tmp_path, "", "."):
    with pytest.raises(IsADirectoryError, match=r"`--page` must be a file; .* Name a file in it"):
      write(path)
  with pytest.raises(FileExistsError, match=r"exists as a folder\. Name a file in it"):
    outputs.check_output(tmp_path, folder=False)
  (tmp_path / "text").touch()
  with pytest.raises(NotADirectoryError, match="must be in a folder"):
    write(tmp_path / "text" / "page")
  write(tmp_path / "new" / "folder" / "page")
  write(tmp_path / ("n" * 250))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_what_may_not_be_written_is_refused(tmp_path):
  (tmp_path / "text").touch(0o444)
  with pytest.raises(PermissionError, match=r"read-only\. Give another one"):
    write(tmp_path / "text")
  tmp_path.chmod(0o555)
  for check in (write, lambda path: outputs.check_output(path, folder=True)):
    with pytest.raises(PermissionError, match="in a folder that may be written"):
      check(tmp_path / "none")
  tmp_path.chmod(0o755)


def fill(path, fails=False):
  with outputs.new_output(path, folder=True) as partial:
    partial.mkdir()
    for name in ("config.json", "weights"):
      (partial / name).write_text(name)
    assert not fails


def test_an_empty_folder_stays_the_folder_that_it_was(tmp_path):
  folder, link = tmp_path / "folder", tmp_path / "link"
  folder.mkdir(0o750)
  link.symlink_to("folder")
  number = folder.stat().st_ino
  with pytest.raises(AssertionError):
    fill(folder, fails=True)
  assert os.listdir(folder) == []
  fill(link)
  assert folder.stat().st_ino == number
  assert link.is_symlink()
  assert {*os.listdir(folder)} == {"config.json", "weights"}
  with pytest.raises(FileExistsError, match="`out` must be new"):
    fill(folder)
  fill(tmp_path / "other")
  assert {*os.listdir(tmp_path)} == {"folder", "link", "other"}


def test_links_are_copied_within_a_folder_and_from_the_cache_of_hugging_face_only(tmp_path):
  model = tmp_path / "models--a--b"
  folder, private = model / "snapshots" / "f00", tmp_path / "private"
  (folder / "more").mkdir(parents=True)
  (model / "blobs").mkdir()
  for path in (private, folder / "own", model / "blobs" / "hash", model / "other"):
    path.write_text(path.name)
  links = {"a": "own", "b": "../../blobs/hash", "c": private, "d": "../../other", "e": "c"}
  for name, to in links.items():
    (folder / name).symlink_to(to)
  outputs.copy_file(folder / "a", tmp_path / "copy")
  assert (tmp_path / "copy").read_text() == "own"
  outputs.copy_file(folder / "b", tmp_path / "copy")
  assert (tmp_path / "copy").read_text() == "hash"
  for name in "cde":
    with pytest.raises(ValueError, match="must be a file of its folder; got a link to"):
      outputs.copy_file(folder / name, tmp_path / "copy")
  (tmp_path / "linked").symlink_to(folder)
  outputs.copy_file(tmp_path / "linked" / "own", tmp_path / "copy")
