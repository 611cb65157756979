"""Strings from outside made harmless, one function per medium. HTML is escaped by its templates, after `terminal`."""

from __future__ import annotations

import re
import unicodedata

_PICTURES = {"\n": "\u21b5", "\t": "\u21e5"}
_COMMAND = re.compile(r"(^|\s)::(?=\S)")
FORMULA = r"^[=+\-@\t\r]"
"""How a cell begins that a spreadsheet takes for a formula."""


def terminal(text: str) -> str:
    """Nothing invisible, nothing that turns the line around, and no line that a CI service takes for its command.

    Control characters become pictures, direction marks and other invisible ones their code.
    """
    shown = text if text.isprintable() else "".join(map(_visible, text))
    if "::" in shown:
        shown = _COMMAND.sub(r"\1\\::", shown)
    return shown.replace("##[", "#\\#[")


def markdown(text: str, *, code: bool = False) -> str:
    """Text that can end neither a cell nor its code span, and starts no markup."""
    text = terminal(text)
    if code:
        return text.replace("|", "\\|").replace("`", "'")
    return re.sub(r"([\\`*_\[\]<>|~])", r"\\\1", text)


def csv(text: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{text}" if re.search(FORMULA, text) else text


def github(text: str, *, of_property: bool = False) -> str:
    """The message, or a property, of a workflow command: a line break cannot start another command."""
    text = terminal(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if of_property else text


def xml(text: str) -> str:
    """Text of JUnit, of which the writer escapes markup: no character that XML cannot hold."""
    return terminal(text)


def _visible(character: str) -> str:
    code = ord(character)
    if character in _PICTURES:
        return _PICTURES[character]
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if character == " " or character.isprintable():
        return character
    return " " if unicodedata.category(character) == "Zs" else f"\u27e8U+{code:04X}\u27e9"
