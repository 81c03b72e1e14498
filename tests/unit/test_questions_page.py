"""The page of ten questions has the same parts for each question, and its tables are those of its commands."""

from __future__ import annotations

import re

import pytest

from tests.support.command import ROOT
from tests.support.documented_commands import commands_of

PAGE = (ROOT / "tpbench/docs/questions.md").read_text()
QUESTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
TITLES = [question.partition("\n")[0] for question in QUESTIONS]


def test_there_are_ten_questions_and_a_link_to_each() -> None:
    links = re.findall(r"^\d+\. \[(.*)\]\(#(.*)\)$", PAGE, flags=re.MULTILINE)
    assert [f"{number}. {title}" for number, (title, _) in enumerate(links, start=1)] == TITLES
    assert len(TITLES) == 10
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in TITLES]
    assert [anchor for _, anchor in links] == anchors


@pytest.mark.parametrize("question", QUESTIONS, ids=TITLES)
def test_a_question_has_one_command_a_short_answer_and_its_table(question: str) -> None:
    blocks = re.findall(r"```bash\n.*?```", question, flags=re.DOTALL)
    (command,) = (each.text for block in blocks for each in commands_of("questions.md", block))
    (answer,) = re.findall(r"^\*\*Answer\.\*\* (.*?)\n\n", question, flags=re.MULTILINE | re.DOTALL)
    assert len(answer) < 400
    assert question.count("\n**Other GPUs.** ") == 1
    for printed in re.findall(r"<!-- (scripts/.*?) -->", question):
        assert f"python {printed.removesuffix(' --format markdown')}" == command
