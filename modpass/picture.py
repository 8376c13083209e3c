"""A picture of a model's blocks in Graphviz's language."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from modpass.blocks import Block, Blocks, Skipped
from modpass.errors import require
from modpass.parts import parts_of
from modpass.sides import hoisted_values, side_inputs

__all__ = ["picture"]

WIDTH = 60  # characters of a line in a box


def picture(blocks: Blocks) -> str:
    """The blocks in order, with their streams, side inputs, hoisted values and refusals, as DOT text.

    Turn it into an image with Graphviz: ``dot -Tsvg blocks.dot -o blocks.svg``.

    Raises:
        MissingExtraError: pydot is not installed.

    >>> picture(Blocks((), (Skipped("layers.0", "Conv", "it convolves over tokens"),))).splitlines()[0]
    'digraph modpass {'
    """
    drawing = _Drawing(require("pydot", "dot"))
    for candidate in blocks.candidates():
        drawing.add(candidate)
    text: str = drawing.graph.to_string()
    return text


class _Drawing:
    def __init__(self, pydot: Any) -> None:
        self.pydot = pydot
        self.graph = pydot.Dot("modpass", graph_type="digraph", rankdir="TB")
        self.graph.set_node_defaults(fontname="Helvetica", fontsize="10")
        self.graph.set_edge_defaults(fontname="Helvetica", fontsize="9")
        self.ids: dict[str, str] = {}
        self.last: dict[str, str] = {}

    def add(self, candidate: Block | Skipped) -> None:
        """One block, joined to the block of the same stack before it."""
        box = self._node(f"block {candidate.name}", _label(candidate), **_style(candidate))
        stack = re.sub(r"\d+(@\d+)?", "*", candidate.name)
        if stack in self.last:
            shape = candidate.stream_shape if isinstance(candidate, Block) else ""
            self._edge(self.last[stack], box, shape)
        self.last[stack] = box
        if isinstance(candidate, Block):
            self._sides(candidate, box)

    def _sides(self, block: Block, box: str) -> None:
        for name, gather in side_inputs(block.analysis).items():
            # A value that the block makes itself, or that its own trace names, is no other block's.
            own = name in hoisted_values(block.analysis) or block.reopened is not None
            side = self._node(f"{block.name if own else ''} {name}", name, shape="ellipse", style="dashed" * own)
            self._edge(side, box, gather, style="dashed")

    def _node(self, key: str, label: str, **attributes: str) -> str:
        if key not in self.ids:
            self.ids[key] = f"n{len(self.ids)}"
            given = {name: value for name, value in attributes.items() if value}
            self.graph.add_node(self.pydot.Node(self.ids[key], label=_quoted(label), **given))
        return self.ids[key]

    def _edge(self, source: str, target: str, label: str, **attributes: str) -> None:
        self.graph.add_edge(self.pydot.Edge(source, target, label=_quoted(label), **attributes))


def _label(candidate: Block | Skipped) -> str:
    title = f"{candidate.name}\n{candidate.kind}"
    if isinstance(candidate, Skipped):
        return f"{title}\nrefused: {candidate.reason}"
    parts = [name for name, cut in parts_of(candidate.analysis).items() if not isinstance(cut, str)]
    lines = [title, f"stream {candidate.stream_shape}", f"parts: {', '.join(['block', *parts])}"]
    if hoisted := hoisted_values(candidate.analysis):
        lines.append(f"hoisted: {', '.join(hoisted)}")
    return "\n".join(lines)


def _style(candidate: Block | Skipped) -> dict[str, str]:
    if isinstance(candidate, Skipped):
        return {"shape": "box", "style": "dashed", "color": "firebrick", "fontcolor": "firebrick"}
    return {"shape": "box", "style": "rounded"}


def _quoted(text: str) -> str:
    """A DOT string of lines of a readable width."""
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, WIDTH) or [""]]
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'
