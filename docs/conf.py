"""Settings of the documentation, which `make docs` builds."""

import ast
import inspect
import json
import os
import pathlib
import re
import textwrap

# Pages and the reference are made without accelerators.
os.environ["JAX_PLATFORMS"] = "cpu"

import matplotlib.font_manager  # noqa: F401  it builds its cache here, not with a message in a page
from flax import linen as nn

import vqjax

project = "vqjax"
author = "the vqjax authors"
project_copyright = author
release = vqjax.__version__

extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
  "sphinx_copybutton",
]
exclude_patterns = ["_static"]
# A type in a signature may be the name of several classes; it is then not a link.
suppress_warnings = ["ref.python"]

# Pages with code are executed, each in a process of its own; an exception or a message on stderr
# fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_output_stderr = "remove-warn"
nb_merge_streams = True
_build = pathlib.Path(__file__).parents[1] / "build"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_build / "jax_cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
_ipython = _build / "ipython" / "profile_default"
_ipython.mkdir(parents=True, exist_ok=True)
(_ipython / "ipython_kernel_config.py").write_text(
  "c = get_config()\nc.IPKernelApp.log_level = 40\nc.InlineBackend.figure_formats = {'svg'}\n"
)
os.environ["IPYTHONDIR"] = str(_ipython.parent)


def notebook(text: str, install: str) -> str:
  """A page as a notebook for Colab and the like, which installs the library first."""
  text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
  # Other pages are not beside a notebook, nor is the link to itself.
  text = re.sub(r"^\{download\}.*\n\n", "", text, flags=re.MULTILINE)
  text = re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
  parts = re.split(r"```(?:\{code-cell\} ipython3|python)\n(.*?)```\n", text, flags=re.DOTALL)
  cells = [("code", f"%pip install --quiet {install}")]
  cells += [(("markdown", "code")[at % 2], part.strip()) for at, part in enumerate(parts)]
  of_code = {"outputs": [], "execution_count": None}
  content = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    "cells": [
      {"id": f"cell-{at}", "cell_type": kind, "metadata": {}, "source": source}
      | (of_code if kind == "code" else {})
      for at, (kind, source) in enumerate(cells)
      if source
    ],
  }
  return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


NOTEBOOKS = {"quickstart": "vqjax", "compression": "'vqjax[torch]'"}
"""Pages that are notebooks too, which they link to, and what these install."""

for _page, _install in NOTEBOOKS.items():
  _text = (pathlib.Path(__file__).parent / f"{_page}.md").read_text("utf-8")
  (_build / f"{_page}.ipynb").write_text(notebook(_text, _install), "utf-8")

myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "sphinx_book_theme"
html_title = "vqjax"
html_static_path = ["_static"]
html_css_files = ["vqjax.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
  "show_toc_level": 2,
  "home_page_in_toc": True,
  "use_download_button": False,
  "use_fullscreen_button": False,
  "navbar_start": [],
  "navbar_center": [],
  "navbar_end": [],
  "navbar_persistent": [],
}
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Backticks in docstrings name Python objects; names that are not in the reference become code.
default_role = "py:obj"
add_module_names = False
# An extra, which is not needed to describe its readers.
autodoc_mock_imports = ["torch"]
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_attr_annotations = False
napoleon_use_rtype = False
maximum_signature_line_length = 88
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"


def signature_as_written(app, what, name, obj, options, args, returns):
  """The signature of the source: jaxtyping's shapes, and defaults by their names.

  A signature at run time expands each array type to a union of classes.
  """
  del app, name, options
  if what == "class":
    return _fields(obj) if args else (args, returns)
  if what not in ("function", "method"):
    return args, returns
  obj = inspect.unwrap(getattr(obj, "__func__", obj))
  node = ast.parse(textwrap.dedent(inspect.getsource(obj))).body[0]
  text = re.sub(r"^(self|cls)(, )?", "", _unparsed(node.args))
  return f"({text})", node.returns and _unparsed(node.returns)


def _unparsed(node):
  return ast.unparse(node).replace("'", '"')


def _fields(cls):
  """The arguments of a class by name; with their shapes for a tuple of results."""
  if issubclass(cls, tuple):
    body = ast.parse(inspect.getsource(cls)).body[0].body
    fields = [_unparsed(node) for node in body if isinstance(node, ast.AnnAssign)]
    return f"({', '.join(fields)})", None
  shown = []
  for parameter in inspect.signature(cls).parameters.values():
    if parameter.name in ("parent", "name"):
      continue
    default = parameter.default
    named = parameter.replace(annotation=parameter.empty)
    if callable(default) and default is not parameter.empty:
      named = named.replace(default=_Named(default.__qualname__.split(".")[0]))
    shown.append(named)
  return str(inspect.Signature(shown)), None


class _Named(str):
  """A default that is shown by its name, without quotes."""

  __repr__ = str.__str__


def is_internal(app, what, name, obj, skip, options):
  """Whether a member is left out, such as one that a contract describes."""
  del app, what, options
  of_linen = name in dir(nn.Module) and name != "__call__"
  of_layers = name in ("declare", "check", "array", "parts")
  # A field's default, or an element of a named tuple.
  value = type(obj).__name__ == "_tuplegetter" or getattr(obj, "__name__", name) != name
  owner = getattr(obj, "__qualname__", "").split(".")[0]
  contracts = "Head", "Embedding", "Quantizer"
  described = owner not in contracts and any(
    owner.endswith(kind) and name in dir(getattr(vqjax, kind)) for kind in contracts
  )
  return skip or of_linen or of_layers or value or described or None


def plain_prose(app, what, name, obj, options, lines):
  """Makes reStructuredText of a docstring that is plain prose.

  An indented paragraph that is not a part of a section is a formula or code, and asterisks outside
  of backticks are those of shapes, such as [*B, V].
  """
  del app, what, name, obj, options
  section, literal, text = False, False, []
  for line in lines:
    stripped = line.strip()
    if stripped and not line.startswith(" "):
      section, literal = re.fullmatch(r"[A-Z][a-z]+:", stripped) is not None, False
    elif stripped and not section and not literal and not stripped.startswith((">>>", "- ")):
      text += ["::", ""]
      literal = True
    if not literal and ">>>" not in line:
      parts = line.split("`")
      parts[::2] = [part.replace("*", r"\*").replace("|", r"\|") for part in parts[::2]]
      line = "`".join(parts)
    text.append(line)
  lines[:] = text


def setup(app):
  """Connects the functions above; before napoleon, which reads the sections."""
  app.connect("autodoc-skip-member", is_internal)
  app.connect("autodoc-process-signature", signature_as_written)
  app.connect("autodoc-process-docstring", plain_prose, priority=400)
