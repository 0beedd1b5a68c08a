"""YAML as configurations are written: a key that stands twice is an error, and not the last one."""

from __future__ import annotations

from typing import Any

import yaml


class RefusedYaml(yaml.MarkedYAMLError):
    """Valid YAML that no configuration means; `problem` says what to change."""


def load(text: str) -> Any:
    """The value of a YAML text, made of plain types only.

    Raises:
        RefusedYaml: a key that stands twice in one mapping, or a value that contains itself.
        yaml.YAMLError: a text that is not YAML.
    """
    return yaml.load(text, Loader=_Loader)


class _Loader(yaml.SafeLoader):
    """Checks while nodes are put together, before `<<` merges what they hold."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[str | None] = []

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            if event.anchor in self._open:
                problem = f"*{event.anchor} stands inside &{event.anchor}: write its value out"
                raise RefusedYaml(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def compose_sequence_node(self, anchor: Any) -> Any:
        self._open.append(anchor)
        node = super().compose_sequence_node(anchor)
        self._open.pop()
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        self._open.append(anchor)
        node = super().compose_mapping_node(anchor)
        self._open.pop()
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if isinstance(key, yaml.ScalarNode) and name in seen:
                problem = f"{key.value} stands twice here: keep one of them"
                raise RefusedYaml(None, None, problem, key.start_mark)
            seen.add(name)
        return node
