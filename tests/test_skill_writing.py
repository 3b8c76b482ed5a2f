"""Skills are read from whatever a model wrote around them, and never made up."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.skill_writing import parse_skill

GOOD = "first find the mug, then clean it"
OBJECT = json.dumps({"summary": "won", "skill": GOOD})
ACCEPTED = {
    "bare object": OBJECT,
    "indented object": json.dumps({"summary": "won", "skill": GOOD}, indent=4),
    "windows line ends": json.dumps({"summary": "won", "skill": GOOD}, indent=1).replace("\n", "\r\n"),
    "code fence": f"```json\n{OBJECT}\n```",
    "code fence without language": f"```\n{OBJECT}\n```",
    "unclosed code fence": f"```json\n{OBJECT}",
    "leading prose": f"Here is the skill you asked for:\n{OBJECT}",
    "trailing prose": f"{OBJECT}\nI hope this helps.",
    "prose with braces before": f"I use {{braces}} freely. {OBJECT}",
    "prose with a lone brace before": f"a set {{ is open. {OBJECT}",
    "trailing comma": f'{{"summary": "won", "skill": "{GOOD}",}}',
    "trailing comma and newline": f'{{"summary": "won", "skill": "{GOOD}",\n}}',
    "other order": f'{{"skill": "{GOOD}", "summary": "won"}}',
    "more keys": f'{{"outcome": 1, "summary": "won", "skill": "{GOOD}"}}',
    "upper-case keys": f'{{"Summary": "won", "SKILL": "{GOOD}"}}',
    "thought before": f'<think>a {{"skill": "not this one at all, no"}}</think>{OBJECT}',
    "array around": f"[{OBJECT}]",
    "nested object": f'{{"result": {OBJECT}}}',
    "two objects, the first without": f'{{"note": "x"}} {OBJECT}',
    "two skills, the first counts": f'{OBJECT} {{"summary": "b", "skill": "another skill that comes too late"}}',
    "plain form": f"summary: won skill: {GOOD}",
    "plain form on lines": f"Summary: won\nSkill: {GOOD}\n",
    "plain form with blanks": f"  summary :  won\n\n skill :  {GOOD}  ",
    "plain form with equals": f"summary = won\nskill = {GOOD}",
    "missing closing brace and quotes": f"{{summary: won, skill: {GOOD}",
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_skill_is_found(name):
    parsed = parse_skill(ACCEPTED[name], cut=False, min_words=5)
    assert (parsed.summary, parsed.skill, parsed.reason) == ("won", GOOD, None)


@pytest.mark.parametrize(
    ("text", "skill"),
    [
        ('{"summary": "s", "skill": "one two\nthree four\nfive"}', "one two\nthree four\nfive"),
        ('{"summary": "s", "skill": "say \\"hi\\" to the fridge and go"}', 'say "hi" to the fridge and go'),
        ('{"summary": "s", "skill": "open the "fridge" and look inside"}', 'open the "fridge" and look inside'),
        (
            '{"summary": "s", "skill": ["look around first", "then take the mug"]}',
            "look around first\nthen take the mug",
        ),
        ('{"summary": "s", "skill": "a } brace { in the text"}', "a } brace { in the text"),
        ('{"summary": "s", "skill": "k\\u00fchle den Apfel im K\\u00fchlschrank"}', "kühle den Apfel im Kühlschrank"),
        ('{"skill": "no summary but five words"}', "no summary but five words"),
    ],
)
def test_the_text_of_a_skill_is_kept(text, skill):
    assert parse_skill(text, cut=False, min_words=5).skill == skill


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no_json"),
        ("I would open the fridge first.", "no_json"),
        ("{}", "no_json"),
        ('{"summary": "won"}', "no_json"),
        ("[1, 2, 3]", "no_json"),
        ('{"summary": "won", "skill": "open the', "no_json"),
        ("the skill of the cook is high", "no_json"),
        ('<think>{"skill": "this was only a thought of mine"}</think>', "no_json"),
        ("{" * 500, "no_json"),
        ('{"summary": "won", "skill": ""}', "empty"),
        ('{"summary": "won", "skill": "  \\n "}', "empty"),
        ('{"summary": "won", "skill": null}', "empty"),
        ('{"summary": "won", "skill": "None"}', "empty"),
        ('{"summary": "won", "skill": "nan"}', "empty"),
        ('{"summary": "won", "skill": 7}', "empty"),
        ('{"summary": "won", "skill": {}}', "empty"),
        ("summary: won skill:", "empty"),
        ('{"summary": "won", "skill": "look around there now"}', "too_short"),
        ("summary: won skill: look", "too_short"),
    ],
)
def test_there_is_no_skill_and_the_reason_says_why(text, reason):
    parsed = parse_skill(text, cut=False, min_words=5)
    assert (parsed.skill, parsed.reason) == (None, reason)


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_reply_that_was_cut_has_no_skill(name):
    assert parse_skill(ACCEPTED[name], cut=True, min_words=5).reason == "length"


def test_the_word_limit_is_inclusive():
    assert parse_skill('{"skill": "a b c"}', cut=False, min_words=3).skill == "a b c"
    assert parse_skill('{"skill": "a b c"}', cut=False, min_words=4).reason == "too_short"


@given(st.text(), st.text())
def test_well_formed_json_comes_back_exactly(summary, skill):
    parsed = parse_skill(json.dumps({"summary": summary, "skill": f"w {skill} w"}), cut=False, min_words=1)
    if "<think>" not in skill:
        assert parsed.skill == f"w {skill} w"


@given(st.text(st.sampled_from('{}",:\\ \nskilsumary<think>`'), max_size=80))
def test_any_text_is_read_without_an_error(text):
    parsed = parse_skill(text, cut=False, min_words=2)
    assert (parsed.skill is None) == (parsed.reason is not None)
