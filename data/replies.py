"""Reading a tagged reply: `<think>...</think>` and then exactly one block that acts (method section 4).

A reply that is not clearly one action is invalid with a short reason code; it never becomes some other action by
accident. Blank space and plain words around the two blocks do not matter, a further tag outside of the thought does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_ANY_TAG = re.compile(r"</?[A-Za-z][\w.:-]*(\s[^<>]*)?/?>")


@dataclass(frozen=True)
class Block:
    """One block of a reply: its tag, and its content without surrounding blanks."""

    tag: str
    content: str


@dataclass(frozen=True)
class ReplyFormat:
    """The format of an environment's replies; `acts` are the tags of which a reply holds exactly one, after its thought."""

    acts: tuple[str, ...]

    @cached_property
    def reasons(self) -> dict[str, str]:
        """Reason codes, and the words in which the environment tells them."""
        block = " or ".join(f"<{tag}>...</{tag}>" for tag in self.acts)
        short = " or ".join(f"<{tag}>" for tag in self.acts)
        name = self.acts[0] if len(self.acts) == 1 else "action"
        return {
            "cut": "it was cut off by the length limit",
            "no_think": "it has no <think>...</think> block",
            "no_action": f"it has no {block} block",
            "two_thinks": "it has more than one <think> block",
            "two_actions": f"it has more than one {short} block",
            "wrong_order": f"the {name} comes before the thought",
            "unclosed": f"a <think> or {short} block is not opened and closed properly",
            "nested": "a block lies inside another block",
            "empty_action": f"the {name} is empty",
            "extra_tag": f"it holds a tag that is neither <think> nor {short.replace(' or ', ' nor ')}",
        }

    def read(self, text: str, *, cut: bool) -> Block | str:
        """The block that acts, or a reason code. `cut`: the length limit ended the reply.

        >>> ReplyFormat(("action",)).read("<think>see</think>\\n<action> look </action>", cut=False)
        Block(tag='action', content='look')
        >>> ReplyFormat(("search", "answer")).read("<answer>Rome</answer>", cut=False)
        'no_think'
        """
        if cut:
            return "cut"
        blocks, outside, reason = self._split(text)
        reason = reason or self._judge([block.tag for block in blocks])
        if reason is not None:
            return reason
        act = blocks[1]
        if _ANY_TAG.search(outside) or _ANY_TAG.search(act.content):
            return "extra_tag"
        return act if act.content else "empty_action"

    def rejection(self, reason: str) -> str:
        """What an environment says about a reply that it cannot read.

        >>> ReplyFormat(("action",)).rejection("empty_action")
        'The reply could not be read: the action is empty.'
        """
        return f"The reply could not be read: {self.reasons.get(reason, reason)}."

    @cached_property
    def _tag(self) -> re.Pattern[str]:
        return re.compile(rf"<(/?)({'|'.join(('think', *self.acts))})>")

    def _split(self, text: str) -> tuple[list[Block], str, str | None]:
        """The blocks in order, the text outside of them, and a reason when they do not nest properly."""
        blocks: list[Block] = []
        outside: list[str] = []
        open_tag, position = None, 0
        for found in self._tag.finditer(text):
            closing, tag = found.group(1) == "/", found.group(2)
            between = text[position : found.start()]
            position = found.end()
            if open_tag is None and not closing:
                outside.append(between)
                open_tag = tag
            elif open_tag is not None and not closing:
                return blocks, "", "nested"
            elif open_tag == tag:
                blocks.append(Block(tag, between.strip()))
                open_tag = None
            else:
                return blocks, "", "unclosed"
        outside.append(text[position:])
        return blocks, "\n".join(outside), "unclosed" if open_tag is not None else None

    def _judge(self, tags: list[str]) -> str | None:
        """The reason why a list of tags is not a thought and an act; None when it is."""
        acts = sum(tag in self.acts for tag in tags)
        if acts != 1:
            return "two_actions" if acts else "no_action"
        thoughts = tags.count("think")
        if thoughts != 1:
            return "two_thinks" if thoughts else "no_think"
        return None if tags[0] == "think" else "wrong_order"
