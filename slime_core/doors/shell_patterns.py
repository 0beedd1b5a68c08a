"""`${X%/}` and its kin, and the escapes of `$'...'`, as bash reads them."""

from __future__ import annotations

import re

from slime_core.errors import ConfigError

ESCAPES = {
    "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
    "v": "\v", "\\": "\\", "'": "'", '"': '"', "?": "?",
}  # fmt: skip
ESCAPE = re.compile(
    r"\\(?:x(?P<hex>[0-9a-fA-F]{1,2})|u(?P<short>[0-9a-fA-F]{1,4})"
    r"|U(?P<long>[0-9a-fA-F]{1,8})|(?P<octal>[0-7]{1,3})|(?P<other>.))", re.S,
)  # fmt: skip


def trimmed(value: str, operator: str, pattern: str) -> str:
    """The value without what the pattern matches at an end.

    Args:
        operator: `%` or `%%` (the shortest or longest match at the end), `#` or `##` (at the
            beginning).
        pattern: text with `*` and `?`.

    Raises:
        ConfigError: a pattern with brackets, quotes or escapes.
    """
    if odd := re.search(r"[\[\](){}\"'\\]", pattern):
        raise ConfigError(f"the pattern {pattern} has a {odd[0]}, which is not read")
    wanted = re.compile(
        "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern), re.S
    )
    lengths = range(len(value) + 1)
    for length in lengths if len(operator) == 1 else reversed(lengths):
        end = operator[0] == "%"
        piece = value[len(value) - length :] if end else value[:length]
        if wanted.fullmatch(piece):
            return value[: len(value) - length] if end else value[length:]
    return value


def unescaped(text: str) -> str:
    r"""What stands between `$'` and `'`, with its `\n` and the like.

    Raises:
        ConfigError: an escape that is not read, such as `\c`.
    """
    return ESCAPE.sub(_character, text)


def _character(match: re.Match[str]) -> str:
    code = match["hex"] or match["short"] or match["long"]
    if code or match["octal"]:
        number = int(code, 16) if code else int(match["octal"], 8)
        if not 0 < number < 0x80 and (match["hex"] or match["octal"]):
            raise ConfigError(f"{match[0]} is a byte that is no text of its own")
        if not 0 < number < 0x110000:
            raise ConfigError(f"{match[0]} is no character")
        return chr(number)
    if match["other"] not in ESCAPES:
        raise ConfigError(f"{match[0]} is an escape that is not read")
    return ESCAPES[match["other"]]
