"""Reads what a launch script of slime would run, without running anything.

Assignments, arrays, `source`, `${VAR:-default}` and the environment are followed. What stands
inside `if`, loops, `case` and functions is not: a variable that is set there has no known value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slime_core.doors.arithmetic import evaluate, sequence
from slime_core.doors.models import preset, presets
from slime_core.doors.shell_patterns import trimmed
from slime_core.doors.shell_words import Line, Part, Word, commands_of, parts_of
from slime_core.errors import ConfigError

ASSIGNMENT = re.compile(r"(\w+)(\+?=)")
ELEMENT = re.compile(r"(\w+)\[[^]]*\]\+?=")
PARAMETER = re.compile(r"(\w+)(?:\[([@*]|\d+)\])?(?:(:?[-=?+]|%%?|##?)(.*))?", re.S)
LENGTH = re.compile(r"#(\w+)(?:\[([@*])\])?")
OPENING = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "{": "}",
           "(": ")"}  # fmt: skip
IGNORED = ("elif", ")", "set", "cd", "sleep", "echo", "wait", "shift", "true")
DECLARING = ("export", "declare", "local", "readonly", "typeset")
SETTING = ("read", "unset", "mapfile", "readarray", "getopts", "let", "printf", "for")
"""Commands that set, or may set, the variables that they name."""
BRACES = re.compile(r"\{[^{}\s]*(,|\.\.)[^{}\s]*\}")
UP = re.compile(r"dirname[^)]*\)[\"']?((?:/\.\.)+)")
ENTRY = re.compile(r"(^|/)train(_async)?\.py$")


@dataclass(frozen=True)
class Unknown:
    """A value that only running the script would show."""

    why: str


Value = str | list[str] | Unknown


@dataclass
class Script:
    """What a script comes to.

    Attributes:
        entry: train.py or train_async.py.
        arguments: the words behind it.
        notes: what was read in another way than bash would, or not at all.
    """

    entry: str = ""
    arguments: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_script(path: Path, environment: Mapping[str, str] | None = None) -> Script:
    """Reads a script up to the command that starts the training.

    Args:
        path: the script.
        environment: variables from outside; by default those of this process.

    Raises:
        ConfigError: no such file, no or several commands that start train.py, or a value that
            cannot be known, with the line.
    """
    return _Follower(os.environ if environment is None else environment).script(path)


class _Follower:
    """Holds the variables while scripts are followed."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._values: dict[str, Value] = {}
        self._found: list[tuple[str, Script]] = []
        self._notes: list[str] = []
        self._others: list[str] = []
        self._exported: list[str] = []
        self._following: list[Path | str] = []

    def script(self, path: Path) -> Script:
        self._follow(path, _text_of(path), path)
        if not self._found:
            raise ConfigError(f"{path}: no command starts train.py: is this a launch script?")
        if len(self._found) > 1:
            places = ", ".join(place for place, _ in self._found)
            raise ConfigError(f"{path}: train.py is started at {places}: leave one of them")
        script = self._found[0][1]
        others = [f"not read: {', '.join(self._others)}"] if self._others else []
        if self._exported:
            names = ", ".join(self._exported)
            self._notes.append(f"environment: export it where you start: {names}")
        script.notes = [*self._notes, *others]
        return script

    def _follow(self, shown: Path | str, text: str, path: Path) -> None:
        """Runs over the commands of one file."""
        if shown in self._following:
            raise ConfigError(f"{shown} sources itself")
        self._following.append(shown)
        open_blocks: list[str] = []
        certain = True
        for line in _read_commands(shown, text):
            if line.words[0].plain in ("then", "else", "do"):
                line = Line(line.number, line.words[1:], line.after)
            word = line.words[0].plain if line.words else ""
            if open_blocks and word == open_blocks[-1]:
                open_blocks.pop()
                continue
            if word in OPENING and not line.words[0].items:
                open_blocks.append(OPENING[word])
                where = f"line {line.number} of {Path(shown).name}"
                if word != "(" and word != "{":
                    self._others.append(f"`{word}` at {where}")
                self._lose(line.words if word == "for" else line.words[1:], where)
                continue
            where = f"line {line.number} of {Path(shown).name}"
            runs = not line.after or (certain and line.after == "&&")
            certain = runs and _succeeds(word)
            if line.words and word not in IGNORED:
                self._command(line, where, path, inside=bool(open_blocks) or not runs)
        self._following.pop()

    def _command(self, line: Line, where: str, path: Path, *, inside: bool) -> None:
        words = list(line.words)
        given: list[Word] = []
        while words and ASSIGNMENT.match(words[0].plain):
            given.append(words.pop(0))
        name = words[0].plain if words else ""
        if not words or name in DECLARING:
            declared = [word for word in words[1:] if ASSIGNMENT.match(word.plain)]
            if name == "export":
                self._exported += map(_assigned, declared)
            for word in declared if words else given:
                self._assign(word, where, path, inside=inside)
        elif name in ("source", ".") and len(words) > 1 and not inside:
            if given:
                raise ConfigError(f"{where}: {_assigned(given[0])}=... before {name} is a form "
                                  "that is not read: give it a line of its own")  # fmt: skip
            self._source(words[1], where, path)
        elif any(_is_entry(word) for word in words):
            # NAME=value before a command is in its environment only, its words do not see it.
            self._exported += map(_assigned, given)
            self._train(words, where, path, inside=inside)
        elif name == ":" and not inside:
            self._defaults(words[1:], where, path)
        else:
            self._lose(words, where)
            self._others.append(f"{name or 'a command'} ({where})")

    def _defaults(self, words: list[Word], where: str, path: Path) -> None:
        """`: ${NAME:=value}`: a command that only gives values to variables without one."""
        try:
            for word in words:
                self._expand(word.parts, path)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    def _lose(self, words: list[Word], where: str) -> None:
        """Variables that a command sets in a way that is not followed have no known value."""
        if not words:
            return
        element = ELEMENT.match(words[0].plain)
        names = [element[1]] if element else []
        if words[0].plain in SETTING:
            texts = ["".join(part.text for part in word.parts) for word in words[1:]]
            if words[0].plain == "printf":
                texts = texts[1:2] if texts[:1] == ["-v"] else []
            elif words[0].plain == "for":
                texts = texts[:1]
            names = [match[0] for text in texts if (match := re.match(r"\w+", text))]
        for name in names:
            self._values[name] = Unknown(f"{words[0].plain} sets it at {where}")

    def _assign(self, word: Word, where: str, path: Path, *, inside: bool) -> None:
        match = ASSIGNMENT.match(word.plain)
        assert match is not None, "only words that begin with NAME= come here"
        name, adds = match[1], match[2] == "+="
        if inside:
            self._values[name] = Unknown(f"it is set inside a block or after && or || at {where}")
            return
        try:
            self._values[name] = self._value(word, match.end(), path, name, adds=adds)
        except ConfigError as error:
            self._values[name] = Unknown(f"{where}: {error}")

    def _value(self, word: Word, start: int, path: Path, name: str, *, adds: bool) -> Value:
        before = self._values.get(name)
        if isinstance(before, Unknown) and adds:
            return before
        if word.items is not None:
            items = [text for item in word.items for text in self._expand(item.parts, path)]
            return [*before, *items] if adds and isinstance(before, list) else items
        first = Part("text", word.parts[0].text[start:], False)
        text = self._joined([first, *word.parts[1:]], path)
        return f"{before}{text}" if adds and isinstance(before, str) else text

    def _source(self, word: Word, where: str, path: Path) -> None:
        """Follows another file: as it is named, beside the script, or our preset of its name."""
        try:
            name = self._joined(word.parts, path)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if not name.endswith(".sh"):
            self._others.append(f"source {name} ({where})")
            return
        for candidate in (Path(name), path.parent / name):
            if candidate.is_file():
                self._follow(candidate, _text_of(candidate), candidate)
                return
        stem = Path(name).stem
        if stem.lower() not in {known.lower() for known in presets()}:
            raise ConfigError(f"{where}: {name} is not there, and no preset is called {stem}")
        kept = self._values.get("CKPT_ARGS")
        found = preset(stem)
        found.require_trainable()
        self._follow(f"preset {stem}", found.bash(), path)
        if kept is not None:
            self._values["CKPT_ARGS"] = kept
        self._set_rotary_base()
        self._notes.append(f"{name} is not there: the preset {stem} stands for it")

    def _set_rotary_base(self) -> None:
        """slime's model scripts take another rotary base from the environment."""
        base = self._values.get("MODEL_ARGS_ROTARY_BASE",
                                self._environment.get("MODEL_ARGS_ROTARY_BASE"))  # fmt: skip
        arguments = self._values.get("MODEL_ARGS")
        if isinstance(base, str) and isinstance(arguments, list):
            arguments[arguments.index("--rotary-base") + 1] = base

    def _train(self, words: list[Word], where: str, path: Path, *, inside: bool) -> None:
        at = next(i for i, word in enumerate(words) if _is_entry(word))
        try:
            texts = [text for word in words[at + 1 :] for text in self._expand(word.parts, path)]
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if inside:
            self._notes.append(f"train.py is started inside a block at {where}")
        entry = words[at].parts[-1].text.rpartition("/")[2]
        self._exported += [_assigned(word) for word in words[:at] if ASSIGNMENT.match(word.plain)]
        if any(word.plain.startswith("--runtime-env") for word in words[:at]):
            self._notes.append("--runtime-env-json: export what it sets where you start")
        self._found.append((where, Script(entry, texts)))

    def _joined(self, parts: list[Part], path: Path) -> str:
        """The parts as one text, as in an assignment."""
        return "".join(" ".join(self._part(part, path)) for part in self._at_home(parts))

    def _at_home(self, parts: list[Part]) -> list[Part]:
        """The parts with a leading ~ as bash reads it."""
        home = self._values.get("HOME", self._environment.get("HOME"))
        first = parts[0] if parts else None
        if not first or first.kind != "text" or first.quoted or not isinstance(home, str):
            return parts
        name, slash, rest = first.text.partition("/")
        return [Part("text", f"{home}{slash}{rest}", True), *parts[1:]] if name == "~" else parts

    def _expand(self, parts: list[Part], path: Path) -> list[str]:
        """The words that bash makes of one word: arrays and unquoted values are several."""
        found: list[str] = []
        current: str | None = None
        for part in self._at_home(parts):
            texts = self._part(part, path)
            if part.kind == "text":
                if not part.quoted and (mark := re.search(r"[*?]", part.text)):
                    raise ConfigError(f"{part.text} has a {mark[0]} outside of quotes: bash may "
                                      "put names of files there, so quote it")  # fmt: skip
            elif not part.quoted:
                texts = [piece for text in texts for piece in text.split()]
            elif part.kind == "variable" and part.text.endswith("[*]"):
                texts = [" ".join(texts)]
            if not texts:
                continue
            current = (current or "") + texts[0]
            for text in texts[1:]:
                found.append(current)
                current = text
        return found if current is None else [*found, current]

    def _part(self, part: Part, path: Path) -> list[str]:
        if part.kind == "text":
            if not part.quoted and BRACES.search(part.text):
                raise ConfigError(f"{part.text} is a form that is not read: write its words out")
            return [part.text]
        if part.kind == "command":
            return self._output(part.text, path)
        return self._variable(part.text, path)

    def _output(self, command: str, path: Path) -> list[str]:
        """What a command prints where that can be known: arithmetic, seq, the script's folder."""
        if command.startswith("(") and command.endswith(")"):
            count = evaluate(command[1:-1], lambda name: "".join(self._variable(name, path)[:1]))
            return [str(count)]
        numbers = sequence(command)
        if numbers is not None:
            return [numbers]
        if "dirname" in command and ("BASH_SOURCE" in command or "$0" in command):
            folder = path.resolve().parent
            ups = UP.search(command)
            for _ in range(ups[1].count("..") if ups else 0):
                folder = folder.parent
            return [str(folder)]
        raise ConfigError(f"what $({command.strip()}) prints is not known without running it")

    def _variable(self, expression: str, path: Path) -> list[str]:
        if expression in ("@", "*"):
            self._notes.append(
                f'"${expression}" is read as nothing: give more flags to slime check'
            )
            return []
        if length := LENGTH.fullmatch(expression):
            texts = self._texts_of(length[1]) or []
            return [str(len(texts) if length[2] else len("".join(texts[:1])))]
        match = PARAMETER.fullmatch(expression)
        if not match or (match[2] and (match[3] or "")[-1:] in ("-", "=", "?", "+")):
            raise ConfigError(f"${{{expression}}} is a form that is not read")
        name, index, operator, other = match[1], match[2] or "0", match[3] or "", match[4] or ""
        texts = self._texts_of(name)
        known = texts is not None
        if texts and index.isdigit():
            texts = texts[int(index) : int(index) + 1]
        empty = not texts or (texts == [""] and operator.startswith(":"))
        if operator.endswith("+"):
            return [] if empty else [self._joined(parts_of(other), path)]
        if empty and operator[-1:] in ("-", "="):
            bare = other.startswith("~/") or other == "~"
            text = (self._joined([Part("text", other[:2], False)] if bare else [], path)
                    + self._joined(parts_of(other[2:] if bare else other), path))  # fmt: skip
            if operator.endswith("="):
                self._values[name] = text
            return [text]
        if not known and name.isdigit():
            raise ConfigError(
                f"${name} is an argument of the script: write its value in the script"
            )
        if not known:
            raise ConfigError(
                f"${name} has no value: give it in the environment, as in "
                f"`{name}=... slime config from-script ...`"
            )
        if operator[:1] in ("%", "#"):
            pattern = self._joined(parts_of(other), path)
            texts = [trimmed(text, operator, pattern) for text in texts or []]
        return texts or ([""] if index.isdigit() else [])

    def _texts_of(self, name: str) -> list[str] | None:
        """What a variable holds, here or in the environment; None where it was never set.

        Raises:
            ConfigError: only running the script would show it.
        """
        value = self._values.get(name, self._environment.get(name))
        if isinstance(value, Unknown) and name in self._environment:
            value = self._environment[name]
        if isinstance(value, Unknown):
            raise ConfigError(f"${name} is not known without running the script: {value.why}")
        return [value] if isinstance(value, str) else value


def _assigned(word: Word) -> str:
    """The variable of a word that begins with NAME=."""
    return word.plain.partition("=")[0].rstrip("+")


def _succeeds(word: str) -> bool:
    """Whether a command surely ends well, so that what follows && runs."""
    known = (*IGNORED, *DECLARING, "source", ".")
    return word in known or bool(ASSIGNMENT.match(word))


def _is_entry(word: Word) -> bool:
    last = word.parts[-1] if word.parts else None
    return last is not None and last.kind == "text" and bool(ENTRY.search(last.text))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file") from error


def _read_commands(shown: Path | str, text: str) -> list[Line]:
    try:
        return commands_of(text)
    except ConfigError as error:
        raise ConfigError(f"{shown}, {error}") from error
