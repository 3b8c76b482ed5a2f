"""Reading a household reply: `<think>...</think>` and then one `<action>...</action>` (method section 4).

A reply that is not clearly one action is invalid with a short reason code; it never becomes some other action by
accident. Blank space and plain words around the two blocks do not matter, a further tag outside of the thought does.
"""

from __future__ import annotations

import re

from data.environments import ParsedReply

# Reason code to the words of the environment's answer.
REASONS: dict[str, str] = {
    "cut": "it was cut off by the length limit",
    "no_think": "it has no <think>...</think> block",
    "no_action": "it has no <action>...</action> block",
    "two_thinks": "it has more than one <think> block",
    "two_actions": "it has more than one <action> block",
    "wrong_order": "the action comes before the thought",
    "unclosed": "a <think> or <action> block is not opened and closed properly",
    "nested": "a block lies inside another block",
    "empty_action": "the action is empty",
    "extra_tag": "it holds a tag that is neither <think> nor <action>",
}

_BLOCK_TAG = re.compile(r"<(/?)(think|action)>")
_ANY_TAG = re.compile(r"</?[A-Za-z][\w.:-]*(\s[^<>]*)?/?>")


def parse_reply(text: str, *, cut: bool) -> ParsedReply:
    """The action of a reply, or None with a reason code of `REASONS`.

    >>> parse_reply("<think>see</think>\\n<action> look </action>", cut=False)
    ParsedReply(action='look', invalid_reason=None)
    >>> parse_reply("<action>look</action>", cut=False).invalid_reason
    'no_think'
    """
    if cut:
        return ParsedReply(None, "cut")
    blocks, outside, reason = _split(text)
    if reason is None:
        reason = _judge([name for name, _ in blocks])
    if reason is not None:
        return ParsedReply(None, reason)
    action = blocks[1][1]
    if _ANY_TAG.search(outside) or _ANY_TAG.search(action):
        return ParsedReply(None, "extra_tag")
    action = action.strip()
    return ParsedReply(action) if action else ParsedReply(None, "empty_action")


def _split(text: str) -> tuple[list[tuple[str, str]], str, str | None]:
    """The blocks (name, content) in order, the text outside of them, and a reason when they do not nest properly."""
    blocks: list[tuple[str, str]] = []
    outside: list[str] = []
    open_name, position = None, 0
    for tag in _BLOCK_TAG.finditer(text):
        closing, name = tag.group(1) == "/", tag.group(2)
        between = text[position : tag.start()]
        position = tag.end()
        if open_name is None and not closing:
            outside.append(between)
            open_name = name
        elif open_name is not None and not closing:
            return blocks, "", "nested"
        elif open_name == name:
            blocks.append((name, between))
            open_name = None
        else:
            return blocks, "", "unclosed"
    outside.append(text[position:])
    return blocks, "\n".join(outside), "unclosed" if open_name is not None else None


def _judge(names: list[str]) -> str | None:
    """The reason why a list of block names is not [think, action]; None when it is."""
    if "action" not in names:
        return "no_action"
    if names.count("action") > 1:
        return "two_actions"
    if "think" not in names:
        return "no_think"
    if names.count("think") > 1:
        return "two_thinks"
    return None if names == ["think", "action"] else "wrong_order"


def rejection_text(reason: str) -> str:
    """What the environment answers to an unreadable reply.

    >>> rejection_text("empty_action")
    'Nothing happens. The reply could not be read: the action is empty.'
    """
    return f"Nothing happens. The reply could not be read: {REASONS.get(reason, reason)}."
