"""Splits a bash script into commands and words. Nothing is run and nothing is expanded here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from slime_core.doors.shell_patterns import unescaped
from slime_core.errors import ConfigError

BLANKS = " \t"
ENDS = "\n;|&"
LINKS = ("&&", "||")
HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
CLOSING = {"{": "}", "(": ")"}


@dataclass(frozen=True)
class Part:
    """A piece of a word.

    Attributes:
        kind: text as it stands, a variable (what stands in `${...}`), or a command (`$(...)`).
        quoted: whether it stands in quotes, so that it is never split.
    """

    kind: Literal["text", "variable", "command"]
    text: str
    quoted: bool


@dataclass
class Word:
    """Parts that stand together. `items` are the words of an array: `NAME=( ... )`."""

    parts: list[Part] = field(default_factory=list)
    items: list[Word] | None = None

    @property
    def plain(self) -> str:
        """The beginning of the word that is plain text: a keyword, or `NAME=`."""
        first = self.parts[0] if self.parts else None
        return first.text if first and first.kind == "text" and not first.quoted else ""


@dataclass(frozen=True)
class Line:
    """One command.

    Attributes:
        number: the line it begins in, counted from 1.
        after: `&&` or `||` where it hangs on how the command before it ended.
    """

    number: int
    words: list[Word]
    after: str = ""


def commands_of(text: str) -> list[Line]:
    """The commands of a script in their order, continued lines joined, comments left out.

    Raises:
        ConfigError: a quote or bracket that is never closed, with its line.
    """
    return _Reader(text).commands()


def parts_of(text: str) -> list[Part]:
    """The parts of a text that stands in double quotes."""
    reader = _Reader(text)
    word = Word()
    while reader.at < len(text):
        reader.double_quoted_piece(word)
    return word.parts


class _Reader:
    """Walks over the characters once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def commands(self) -> list[Line]:
        found: list[Line] = []
        words: list[Word] = []
        number, after = 1, ""
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in BLANKS or self.text.startswith("\\\n", self.at):
                self.at += 2 if char == "\\" else 1
            elif char == "#":
                self._to_end_of_line()
            elif self._redirection():
                continue
            elif char in ENDS or char in "()":
                if words:
                    found.append(Line(number, words, after))
                    words, after = [], ""
                if char in "()":
                    found.append(Line(self._line(), [Word([Part("text", char, False)])], after))
                    after = ""
                if self.text.startswith(LINKS, self.at):
                    after = self.text[self.at : self.at + 2]
                self.at += 2 if self.text.startswith(LINKS, self.at) else 1
            else:
                number = number if words else self._line()
                words.append(self._word())
        return [*found, Line(number, words, after)] if words else found

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _to_end_of_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _redirection(self) -> bool:
        """Skips `2>&1`, `> file`, `&> file`, `< file` and here-documents."""
        heredoc = HEREDOC.match(self.text, self.at)
        if heredoc:
            end = re.compile(rf"^\s*{heredoc[2]}$", re.M).search(self.text, heredoc.end())
            self.at = end.end() if end else len(self.text)
            return True
        match = re.compile(r"(\d*|&)(>>?|<)(&\d+|&-)?").match(self.text, self.at)
        if not match:
            return False
        self.at = match.end()
        if not match[3]:
            while self.at < len(self.text) and self.text[self.at] in BLANKS:
                self.at += 1
            self._word()
        return True

    def _word(self) -> Word:
        word = Word()
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "(" and word.plain.endswith("=") and len(word.parts) == 1:
                word.items = self._array()
                return word
            if char in BLANKS or char in ENDS or char in "()<>":
                break
            self._piece(word)
        return word

    def _array(self) -> list[Word]:
        begun = self._line()
        self.at += 1
        items: list[Word] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == ")":
                self.at += 1
                return items
            if char in BLANKS or char == "\n":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "#":
                self._to_end_of_line()
            elif char in ENDS or char in "(<>":
                raise ConfigError(f"line {self._line()}: {char} cannot stand in an array")
            else:
                items.append(self._word())
        raise ConfigError(f"line {begun}: ( is never closed")

    def _piece(self, word: Word) -> None:
        char = self.text[self.at]
        if char == "'":
            end = self._find("'", self.at + 1)
            word.parts.append(Part("text", self.text[self.at + 1 : end], True))
            self.at = end + 1
        elif self.text.startswith("$'", self.at):
            begun, end = self._line(), self._end_of_escaped(self.at + 2)
            try:
                word.parts.append(Part("text", unescaped(self.text[self.at + 2 : end]), True))
            except ConfigError as error:
                raise ConfigError(f"line {begun}: {error}") from error
            self.at = end + 1
        elif self.text.startswith('$"', self.at):
            self.at += 1  # a translated text; without translations the text itself
        elif char == '"':
            begun = self._line()
            self.at += 1
            before = len(word.parts)
            while not self.text.startswith('"', self.at):
                if self.at >= len(self.text):
                    raise ConfigError(f'line {begun}: " is never closed')
                self.double_quoted_piece(word)
            if len(word.parts) == before:
                word.parts.append(Part("text", "", True))  # "" is a word, too
            self.at += 1
        elif char == "\\":
            if not self.text.startswith("\\\n", self.at):
                self._add(word, self.text[self.at + 1 : self.at + 2], True)
            self.at += 2
        elif not self._expansion(word, quoted=False):
            self._add(word, char, False)
            self.at += 1

    def _end_of_escaped(self, start: int) -> int:
        """Where `$'...'` ends: at a quote without a backslash before it."""
        end = re.compile(r"(?:[^'\\]|\\.)*'", re.S).match(self.text, start)
        if not end:
            raise ConfigError(f"line {self._line()}: $' is never closed")
        return end.end() - 1

    def double_quoted_piece(self, word: Word) -> None:
        """One piece inside double quotes."""
        char = self.text[self.at]
        if char == "\\" and self.text[self.at + 1 : self.at + 2] in '"\\$`\n':
            following = self.text[self.at + 1 : self.at + 2]
            self._add(word, "" if following == "\n" else following, True)
            self.at += 2
        elif not self._expansion(word, quoted=True):
            self._add(word, char, True)
            self.at += 1

    def _expansion(self, word: Word, *, quoted: bool) -> bool:
        """`$NAME`, `${...}`, `$(...)` or backticks."""
        if self.text[self.at] == "`":
            end = self._find("`", self.at + 1)
            word.parts.append(Part("command", self.text[self.at + 1 : end], quoted))
            self.at = end + 1
            return True
        following = self.text[self.at + 1 : self.at + 2]
        if self.text[self.at] != "$" or not following:
            return False
        if following in CLOSING:
            end = self._closing(self.at + 1)
            kind: Literal["variable", "command"] = "variable" if following == "{" else "command"
            word.parts.append(Part(kind, self.text[self.at + 2 : end], quoted))
            self.at = end + 1
            return True
        match = re.compile(r"\w+|[@*#?$!-]").match(self.text, self.at + 1)
        if not match:
            return False
        name = match[0] if not match[0][0].isdigit() else match[0][0]
        word.parts.append(Part("variable", name, quoted))
        self.at += 1 + len(name)
        return True

    def _closing(self, start: int) -> int:
        """Where the bracket at `start` is closed."""
        opening, depth, at = self.text[start], 0, start
        while at < len(self.text):
            char = self.text[at]
            if char == "\\":
                at += 1
            elif char == "'" and opening == "(":
                at = self._find("'", at + 1)
            elif char == opening:
                depth += 1
            elif char == CLOSING[opening]:
                depth -= 1
                if depth == 0:
                    return at
            at += 1
        raise ConfigError(
            f"line {self.text.count(chr(10), 0, start) + 1}: {opening} is never closed"
        )

    def _find(self, mark: str, start: int) -> int:
        end = self.text.find(mark, start)
        if end < 0:
            number = self.text.count("\n", 0, start) + 1
            raise ConfigError(f"line {number}: {mark} is never closed")
        return end

    def _add(self, word: Word, text: str, quoted: bool) -> None:
        """Text joins the text before it where both are quoted or both are not."""
        last = word.parts[-1] if word.parts else None
        if last and last.kind == "text" and last.quoted == quoted:
            word.parts[-1] = Part("text", last.text + text, quoted)
        else:
            word.parts.append(Part("text", text, quoted))
