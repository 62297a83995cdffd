"""Reference pages that follow from the code: fields of settings, public names, commands, calls between peers,
record rules.

Directives for pages in Markdown:

    {fields} package.module.Class      a table: field, type, default, meaning (the comment beside the field)
    {presets}                          a table: the times of each preset
    {public-names} home …              the public names of `swarm` whose home module begins with one of these
    {commands}                         the help of every command
    {calls}                            every remote call, with its limits
    {record-rules}                     what a run's DHT keys take
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import click
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from docs._ext.fields import fields_of
from docs._ext.methods import methods


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("fields", Fields)
    app.add_directive("presets", Presets)
    app.add_directive("public-names", PublicNames)
    app.add_directive("commands", Commands)
    app.add_directive("calls", Calls)
    app.add_directive("record-rules", RecordRules)
    return {"parallel_read_safe": True}


class Fields(SphinxDirective):
    """The fields of a dataclass or of a pydantic model, from its source.

    Lines of the directive such as `name: meaning` say what a field means that has no comment in the source.
    """

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        home, _, name = self.arguments[0].rpartition(".")
        described = fields_of(getattr(importlib.import_module(home), name))
        given = dict(line.split(": ", 1) for line in self.content if line.strip())
        unknown = given.keys() - {one.name for one in described}
        if unknown:
            raise self.error(f"{self.arguments[0]} has no field {', '.join(sorted(unknown))}")
        rows = [
            [_code(one.name), _code(one.type), _code(one.default), [_text(given.get(one.name, one.meaning))]]
            for one in described
        ]
        return [_table(["field", "type", "default", "meaning"], rows, [18, 22, 18, 42])]


class Presets(SphinxDirective):
    """The times that the presets set, side by side."""

    def run(self) -> list[nodes.Node]:
        from swarm.core.presets import LAN, LOCAL, WAN, Timings

        rows = [
            [
                _code(one.name),
                *([_text(f"{getattr(timings, one.name):g}")] for timings in (LOCAL, LAN, WAN)),
                [_text(one.meaning)],
            ]
            for one in fields_of(Timings)
        ]
        return [_table(["time", "local", "lan", "wan", "meaning"], rows, [24, 8, 8, 8, 52])]


class PublicNames(SphinxDirective):
    """Public names of `swarm`, grouped by where they come from; every one with its docstring and members."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        import swarm

        homes = tuple(self.arguments[0].split())
        blocks = []
        for name in sorted(swarm.__all__):
            value = getattr(swarm, name)
            if name == "__version__" or not value.__module__.startswith(homes):
                continue
            if any(value.__module__.startswith(other) for other in _longer(value.__module__, homes)):
                continue
            blocks.append(
                f"```{{eval-rst}}\n.. autoclass:: swarm.{name}\n   :members:\n   :show-inheritance:\n```\n"
            )
            if dataclasses.is_dataclass(value) and dataclasses.fields(value):
                blocks.append(
                    f"Fields of `{name}`:\n\n```{{fields}} {value.__module__}.{value.__name__}\n```\n"
                )
        return self.parse_text_to_nodes("\n".join(blocks))


def _longer(module: str, homes: tuple[str, ...]) -> tuple[str, ...]:
    """Errors have a group of their own, wherever they are at home."""
    return () if any("errors" in home for home in homes) else ("swarm.core.errors", "moe.protocol.errors")


class Commands(SphinxDirective):
    """`swarm COMMAND --help`, as it is printed on a terminal of 100 columns."""

    def run(self) -> list[nodes.Node]:
        from swarm.cli.commands import swarm as group

        made: list[nodes.Node] = [*self._one("swarm", group)]
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            made += self._one(f"swarm {name}", command)
        return made

    def _one(self, name: str, command: click.Command) -> list[nodes.Node]:
        context = click.Context(command, info_name=name, terminal_width=100, max_content_width=100)
        section = nodes.section(ids=[nodes.make_id(name)], names=[name])
        section += nodes.title(name, name)
        section += nodes.literal_block(text=command.get_help(context), language="text")
        self.state.document.note_explicit_target(section)
        return [section]


class Calls(SphinxDirective):
    """Every call that peers make, with the size limits that both ends enforce."""

    def run(self) -> list[nodes.Node]:
        from swarm.net.rpc import Method

        rows = []
        for name, method in sorted(methods().items()):
            if isinstance(method, Method):
                limits = f"{_bytes(method.request_bytes_max)} / {_bytes(method.reply_bytes_max)}"
                messages = f"{method.request.DESCRIPTOR.name} → {method.reply.DESCRIPTOR.name}"
                rows.append([_code(name), [_text("unary")], _code(messages), [_text(limits)]])
            else:
                rows.append(
                    [
                        _code(name),
                        [_text("stream")],
                        [_text("bytes both ways")],
                        [_text(_bytes(method.message_bytes_max))],
                    ]
                )
        return [
            _table(["call", "kind", "messages", "limit: request / reply, or message"], rows, [30, 10, 36, 24])
        ]


class RecordRules(SphinxDirective):
    """The rules that every peer applies to the names of a run's namespace."""

    def run(self) -> list[nodes.Node]:
        from swarm.dht.logic.run_rules import RUN_RULES

        rows = [
            [
                _code(rule.name),
                [_text(_bytes(rule.value_bytes_max))],
                [_text(f"{rule.ttl_s_max:g} s")],
                _code(_schema(rule.schema)),
            ]
            for rule in RUN_RULES
        ]
        return [
            _table(
                ["name", "value at most", "lifetime at most", "fields (those with ? may be left out)"],
                rows,
                [14, 14, 14, 58],
            )
        ]


def _bytes(count: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


def _schema(schema: Any) -> str:
    required, optional = getattr(schema, "required", {}), getattr(schema, "optional", {})
    return ", ".join([*required, *(f"{name}?" for name in optional)]) or "any"


def _text(text: str) -> nodes.paragraph:
    """A paragraph in which `code` is code."""
    paragraph = nodes.paragraph()
    for number, part in enumerate(text.split("`")):
        if part:
            paragraph += nodes.literal(part, part) if number % 2 else nodes.Text(part)
    return paragraph


def _code(text: str) -> list[nodes.Node]:
    return [nodes.paragraph("", "", nodes.literal(text, text))]


def _table(heads: list[str], rows: list[list[list[nodes.Node]]], widths: list[int]) -> nodes.table:
    table, group = nodes.table(), nodes.tgroup(cols=len(heads))
    table += group
    for width in widths:
        group += nodes.colspec(colwidth=width)
    head, body = nodes.thead(), nodes.tbody()
    group += [head, body]
    head += _row([[nodes.paragraph("", one)] for one in heads])
    for row in rows:
        body += _row(row)
    return table


def _row(cells: list[list[nodes.Node]]) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        entry = nodes.entry()
        entry += cell
        row += entry
    return row
