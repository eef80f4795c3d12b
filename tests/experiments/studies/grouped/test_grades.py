"""Does an answer become grades, or an error that says what is wrong, and never a guess?"""

import pytest

from experiments.studies.grouped.grade_parser import FORMAT, Grades, Unparsable, parse, question

LINE = "Grammar: 8/10, Creativity: 7/10, Consistency: 7/10, Plot: 6/10, Age group: E (10-12)"
EXPECTED = Grades(8, 7, 7, 6, 11)


@pytest.mark.parametrize(
  "answer",
  [
    LINE,
    f"The language is good.\n\n{LINE}\n",
    f"Grammar: the sentences are correct.\nPlot: it wanders.\n\n{LINE}",
    f"{LINE}\n{LINE}",
    f"<think>Grammar: 2/10, or Plot: 99?</think>{LINE}",
    "Grammar: 8 / 10, Creativity: 7.0, Consistency: 7 out of 10, Plot: 6, Age group: E.",
    "**Age group:** E\n- **Plot**: 6/10 (thin)\n- Consistency = 7\nGrammar - 8\nCreativity: *7*",
    '{"grammar": 8, "creativity": 7, "consistency": 7.0, "plot": 6, "age_group": "E (10-12)"}',
    "grammar: 8/10; CREATIVITY: 7/10; Consistency: 7/10; Plot: 6/10; Age: e: 10 to 12 years old",
  ],
)
def test_grades_are_read_however_they_are_written(answer):
  assert parse(answer) == EXPECTED


@pytest.mark.parametrize(
  ("group", "years"),
  [
    ("A (3 or under)", 2.5),
    ("A: 3 or younger", 2.5),
    ("B (4-5)", 4.5),
    ("C", 6.5),
    ("D (8-9)", 8.5),
    ("E (10\N{EN DASH}12)", 11),
    ("F (13-16 years)", 14.5),
  ],
)
def test_an_age_is_the_middle_of_its_group(group, years):
  assert parse(LINE.replace("E (10-12)", group)).age == years


@pytest.mark.parametrize(
  ("was", "now", "message"),
  [
    (LINE, "", "no grade for grammar"),
    (LINE, FORMAT, "grammar has"),
    (LINE, "I would give it eight out of ten.", "no grade for grammar"),
    (LINE, f"<think>{LINE}", "broke off before its grades"),
    ("Plot: 6/10, ", "", "no grade for plot"),
    ("Plot: 6/10", "Plot: 6/10, Plot: 5/10", "plot stands there with several values"),
    ("8/10", "nan", "no grade for grammar"),
    ("8/10", "inf/10", "no grade for grammar"),
    ("8/10", "eight", "no grade for grammar"),
    ("8/10", "11/10", "grammar 11 is outside 0 to 10"),
    ("8/10", "10.5", "grammar 10.5 is outside 0 to 10"),
    *(
      ("8/10", wrong, f"grammar has '{wrong}")
      for wrong in (
        "-8/10",
        "4/5",
        "80/100",
        "80%",
        "8e0",
        "8,5/10",
        "7-8",
        "7/10 or 8/10",
        "8 slips",
      )
    ),
    (", Age group: E (10-12)", "", "no age group"),
    ("E (10-12)", "G (17-20)", "age group 'G (17-20)' is none of A (3 or under), B (4-5)"),
    ("E (10-12)", "E or F", "age group 'E or F' is none of"),
    ("E (10-12)", "11", "age group '11' is none of"),
    ("E (10-12)", "?", "age group '?' is none of"),
    ("E (10-12)", "E (8-9)", "has the years of another: it is 10-12"),
    ("E (10-12)", "E, Age: D", "age group stands there with several values"),
  ],
)
def test_no_grade_is_invented(was, now, message):
  with pytest.raises(Unparsable) as raised:
    parse(LINE.replace(was, now))
  assert message in str(raised.value)


def test_the_question_holds_the_story_as_it_is():
  asked = question("Once {completion}", " upon {beginning} a %s \udc80")
  assert "Once {completion}*** upon {beginning} a %s \udc80\n" in asked
  assert asked.endswith(FORMAT)
