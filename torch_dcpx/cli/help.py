"""The help of `dcpx`: commands under what they do, an example of each, nothing cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

WIDTH = 80  # columns

_SECTIONS = {
    "Look": "ls inspect cat diff stats trace",
    "Check": "verify doctor",
    "Change": "export repair gc run",
}


class Command(click.Command):
    """A command with an example of its use, which a test runs."""

    def __init__(self, *args: Any, example: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.example = example

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.example:
            with formatter.section("Example"):
                formatter.write(f"{'':{formatter.current_indent}}{self.example}\n")


class Commands(click.Group):
    """The commands, which its help groups by what they do."""

    command_class = Command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        named = [name for names in _SECTIONS.values() for name in names.split()]
        more = [name for name in self.commands if name not in named]
        for heading, names in {**_SECTIONS, "More": " ".join(more)}.items():
            rows = list(self._rows(names.split()))
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def _rows(self, names: Iterable[str]) -> Iterable[tuple[str, str]]:
        for name in names:
            if name in self.commands:
                text = " ".join((self.commands[name].help or "").split("\n\n")[0].split())
                yield name, text.partition(". ")[0].removesuffix(".")
