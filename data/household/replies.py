"""Household replies: a thought and one `<action>...</action>`; the format is `data.replies`'."""

from __future__ import annotations

from data.environments import ParsedReply
from data.replies import ReplyFormat

FORMAT = ReplyFormat(("action",))
REASONS = FORMAT.reasons


def parse_reply(text: str, *, cut: bool) -> ParsedReply:
    """The action of a reply, or None with a reason code of `REASONS`.

    >>> parse_reply("<think>see</think>\\n<action> look </action>", cut=False)
    ParsedReply(action='look', invalid_reason=None)
    >>> parse_reply("<action>look</action>", cut=False).invalid_reason
    'no_think'
    """
    block = FORMAT.read(text, cut=cut)
    return ParsedReply(None, block) if isinstance(block, str) else ParsedReply(block.content)


def rejection_text(reason: str) -> str:
    """What the environment answers to an unreadable reply.

    >>> rejection_text("empty_action")
    'Nothing happens. The reply could not be read: the action is empty.'
    """
    return f"Nothing happens. {FORMAT.rejection(reason)}"
