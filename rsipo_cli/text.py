"""Text of models, games and files made safe to show: no control character reaches a terminal."""

from __future__ import annotations

import re
import unicodedata

# CSI (colours, cursor), OSC (titles, links) up to BEL or ST, and two-character escapes.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-_]|\x9b[0-?]*[ -/]*[@-~]")


def visible(text: str) -> str:
    """One line without terminal escapes, control characters, text-direction marks or lone surrogates.

    >>> visible("a\\x1b[31mred\\x1b[0m\\nb\\x07")
    'ared b'
    """
    text = _ESCAPES.sub("", text)
    kept = (
        " " if char in "\n\r\t\x0b\x0c\x85\u2028\u2029" else char
        for char in text
        if char in "\n\r\t\x0b\x0c\x85\u2028\u2029" or unicodedata.category(char) not in {"Cc", "Cf", "Cs"}
    )
    return "".join(kept)
