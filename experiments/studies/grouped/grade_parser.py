"""What is a judge of stories asked, and which grades does its answer hold?

The instrument is that of TinyStories (Eldan and Li, 2023), by which the paper grades too: a judge
reads a beginning and what a student made of it, says first what it thinks, and then grades.
"""

import re
from typing import NamedTuple

ASPECTS = ("grammar", "creativity", "consistency", "plot")
"""What is graded from 0 to 10, in the order of the paper's columns."""

AGE_GROUPS = {"A": (2, 3), "B": (4, 5), "C": (6, 7), "D": (8, 9), "E": (10, 12), "F": (13, 16)}
"""The groups of ages that a judge chooses from: first and last year.

Group A is "3 or under". It has no first year; here it spans two years as its neighbours do.
"""

MOST = 10
"""The best grade."""


class Grades(NamedTuple):
  """A judge's opinion of one story.

  Attributes:
    grammar: from 0 to 10.
    creativity: likewise.
    consistency: of the completion with the beginning, likewise.
    plot: whether it makes sense, likewise.
    age: of a child that would write so, in years: the middle of the group that the judge chose. The
      paper does not say how its ages come from groups.
  """

  grammar: float
  creativity: float
  consistency: float
  plot: float
  age: float


class Unparsable(ValueError):
  """An answer without grades, or with grades that cannot be believed."""


def _years(group: str) -> str:
  first, last = AGE_GROUPS[group]
  return f"{last} or under" if group == "A" else f"{first}-{last}"


FORMAT = (
  ", ".join(f"{name.capitalize()}: ?/{MOST}" for name in ASPECTS) + ", Age group: ? (its years)"
)
"""The last line of an answer, with a question mark for each thing to fill in."""

_GROUPS = ", ".join(f"{group} ({_years(group)})" for group in AGE_GROUPS)


def question(beginning: str, completion: str) -> str:
  """What a judge is asked about a story."""
  return f"""\
A student was given the beginning of a story and had to go on with it. Below is the whole text: \
the symbol *** stands where the given beginning ends and the student's own part starts. The \
beginning may break off in the middle of a sentence.

{beginning}***{completion}

Judge the student's part alone, as a teacher of language would.

First write a short assessment in words: is the language correct, are there ideas of its own, does \
it go on from the beginning (its people, places and events, and the sentence that was broken off), \
and does what happens make sense?

Then grade grammar, creativity, consistency with the beginning, and whether the plot makes sense, \
each from 0 (worst) to {MOST} (best). Guess also how old the student is, by one of these groups of \
years: {_GROUPS}.

The last line of your answer has exactly this form, with your grades in place of the question \
marks:
{FORMAT}"""


def reminder(error: Unparsable) -> str:
  """What a judge is told whose answer had no grades."""
  return f"I cannot read your grades: {error}. Answer with this one line, filled in:\n{FORMAT}"


_MARK = re.compile(
  r"\b(?P<name>" + "|".join(ASPECTS) + r"|age(?:[ _]+group)?)(?:\s*[:=]|\s+[-–—]\s)\s*",
  re.IGNORECASE,
)
_ASIDE = r"[\s,;.|()\[\]{}]*"
_GRADE = re.compile(
  rf"([0-9]+(?:\.[0-9]+)?)(?:\s*(?:/|out of)\s*{MOST}(?![\w%])[^0-9/]*|{_ASIDE})", re.IGNORECASE
)
_GROUP = re.compile(
  r"([A-Z])(?:[\s(:,-]+([0-9]+)(?:\s*(?:-|–|—|to)\s*([0-9]+)|\s+(?:or|and)\s+\w+)?"
  rf"(?:\s*years?(?:[ -]old)?)?)?{_ASIDE}",
  re.IGNORECASE,
)


def parse(answer: str) -> Grades:
  """The grades of an answer, which may stand in any order, in bold, as "8 / 10", "8.5" or "8".

  Raises:
    Unparsable: a grade is missing, is no number from 0 to 10 or stands there twice with two values;
      the group of ages is none of the six, or its years are those of another.
  """
  text = answer.rpartition("</think>")[2]  # what a reasoning model weighed is no grade
  if "<think>" in text:
    raise Unparsable("the answer broke off before its grades")
  text = re.sub(r"[*`\"]", "", text)
  marks = list(_MARK.finditer(text))
  found: dict[str, set[float]] = {name: set() for name in Grades._fields}
  for mark, next_mark in zip(marks, [*marks[1:], None]):
    value = text[mark.end() : next_mark.start() if next_mark else None].split("\n")[0].strip()
    name = mark["name"].lower()
    name = "age" if name.startswith("age") else name
    found[name] |= _age(value) if name == "age" else _grade(name, value)
  return Grades(**{name: _only(name, values) for name, values in found.items()})


def _grade(name: str, value: str) -> set[float]:
  """The grade, or none where there are words: a heading, not a grade."""
  value = value.lstrip("([ ")
  if not value or value[0].isalpha():
    return set()
  match = _GRADE.fullmatch(value)
  if match is None:
    raise Unparsable(f"{name} has {_quote(value)} for a grade from 0 to {MOST}")
  grade = float(match[1])
  if not 0 <= grade <= MOST:
    raise Unparsable(f"{name} {grade:g} is outside 0 to {MOST}")
  return {grade}


def _age(value: str) -> set[float]:
  value = value.lstrip("([ ")
  if re.match(r"[A-Za-z]\w", value) or not value:
    return set()
  match = _GROUP.fullmatch(value)
  if match is None or match[1].upper() not in AGE_GROUPS:
    raise Unparsable(f"age group {_quote(value)} is none of {_GROUPS}")
  group = match[1].upper()
  years = [int(year) for year in match.groups()[1:] if year]
  if years and years != [int(year) for year in re.findall("[0-9]+", _years(group))]:
    raise Unparsable(f"age group {_quote(value)} has the years of another: it is {_years(group)}")
  return {sum(AGE_GROUPS[group]) / 2}


def _only(name: str, values: set[float]) -> float:
  name = "age group" if name == "age" else name
  if not values:
    raise Unparsable(f"no grade for {name}" if name != "age group" else "no age group")
  if len(values) > 1:
    raise Unparsable(f"{name} stands there with several values")
  return values.pop()


def _quote(text: str) -> str:
  return repr(text if len(text) <= 60 else text[:57] + "...")
