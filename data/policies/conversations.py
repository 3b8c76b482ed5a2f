"""What a policy's training text is made of: messages, of which some are for the policy to learn to say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """One message; `loss` marks what the policy is to learn to say."""

    role: str
    content: str
    loss: bool


Conversation = list[Message]
