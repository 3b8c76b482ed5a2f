"""Search replies: a thought, and then one `<search>query</search>` or one `<answer>text</answer>`."""

from __future__ import annotations

from typing import Literal

from data.environments import ParsedReply
from data.replies import ReplyFormat

FORMAT = ReplyFormat(("search", "answer"))
Act = Literal["search", "answer"]


def parse_reply(text: str, *, cut: bool) -> ParsedReply:
    """The action of a reply as `search: query` or `answer: text`, or None with a reason code of `FORMAT.reasons`.

    >>> parse_reply("<think>who?</think><search> Mira\\nKolben </search>", cut=False).action
    'search: Mira Kolben'
    >>> parse_reply("<think>so</think><search>a</search><answer>b</answer>", cut=False).invalid_reason
    'two_actions'
    """
    block = FORMAT.read(text, cut=cut)
    if isinstance(block, str):
        return ParsedReply(None, block)
    return ParsedReply(f"{block.tag}: {' '.join(block.content.split())}")


def split_action(action: str) -> tuple[str, str]:
    """The act and its text. Raises ValueError for anything that `parse_reply` does not return.

    >>> split_action("answer: to be: or not")
    ('answer', 'to be: or not')
    """
    act, colon, text = action.partition(": ")
    if not colon or act not in FORMAT.acts or not text:
        raise ValueError(f"not an action of the search world: {action!r}")
    return act, text
