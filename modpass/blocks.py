"""Find the residual blocks of a traced model, and say why each other candidate cannot be routed."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram

from modpass.analysis import Analysis, analyse
from modpass.examine import Examiner
from modpass.mixing import name_of
from modpass.reopen import Reopened, Reopener
from modpass.sides import side_inputs
from modpass.sizes import Refusal
from modpass.symbols import shape_of, value_of
from modpass.tracing import Traced, capture

__all__ = ["Block", "Blocks", "Skipped", "find_blocks", "locate"]


_PRODUCTS = {
    *("linear", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d"),
    "scaled_dot_product_attention",
}


@dataclass(frozen=True)
class Block:
    """A block that can be routed: its module path, class name, and what the analysis found."""

    name: str
    kind: str
    nodes: list[fx.Node] = field(repr=False)
    analysis: Analysis = field(repr=False)
    reopened: Reopened | None = field(default=None, repr=False)

    @property
    def group(self) -> str:
        """The path with its numbers left out: blocks of one stack share it."""
        return re.sub(r"\d+(@\d+)?", "*", self.name)

    @property
    def stream_shape(self) -> str:
        """The stream's shape in words of the trace: ``[B, S, 576]``."""
        if self.analysis.order is not None:
            sizes = self.analysis.sizes
            names = {sizes.batch: "B", sizes.sequence: "S"}
            return f"[{', '.join(str(names.get(s, s)) for s in shape_of(value_of(self.analysis.stream)))}]"
        order = ["B", "S"] if self.analysis.seq_dim == 1 else ["S", "B"]
        return f"[{', '.join(order)}, {self.analysis.width}]"


@dataclass(frozen=True)
class Skipped:
    """A candidate that cannot be routed, and the reason."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Blocks:
    """What could be routed (iterate over it) and what could not; prints as a table."""

    found: tuple[Block, ...]
    skipped: tuple[Skipped, ...]
    order: tuple[str, ...] = ()

    def candidates(self) -> list[Block | Skipped]:
        """Both kinds, in the order in which they run."""
        place = {name: i for i, name in enumerate(self.order)}
        return sorted([*self.found, *self.skipped], key=lambda c: place.get(c.name, 0))

    def __iter__(self) -> Iterator[Block]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, index: int) -> Block:
        return self.found[index]

    def names(self) -> list[str]:
        """The names of the blocks that can be routed, in order."""
        return [b.name for b in self.found]

    def __str__(self) -> str:
        rows = [(b.name, b.kind, b.stream_shape, _sides(b)) for b in self.found]
        rows += [(s.name, s.kind, "refused", s.reason) for s in self.skipped]
        header = ("block", "class", "stream", "side inputs at the chosen tokens, or reason")
        widths = [max(len(r[i]) for r in [header, *rows]) for i in range(3)]
        return "\n".join(
            "  ".join([*(r[i].ljust(widths[i]) for i in range(3)), r[3]]).rstrip() for r in [header, *rows]
        )


def _sides(block: Block) -> str:
    return "; ".join(f"{n}: {g}" for n, g in side_inputs(block.analysis).items()) or "none"


def find_blocks(model: nn.Module | ExportedProgram, example_inputs: Any = None, *, check: bool | None = None) -> Blocks:
    """The blocks of ``model`` that could be routed, and each refusal with its reason. Changes nothing.

    ``check`` as in ``mod_transform``.

    Raises:
        TraceError: the model cannot be traced.
        InputError: no example inputs were given and the model does not say what it takes.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> import torch
    >>> find_blocks(encoder, (torch.randn(2, 5, 8),)).names()
    ['layers.0', 'layers.1']
    """
    return locate(capture(model, example_inputs), check)


def locate(traced: Traced, check: bool | None = None) -> Blocks:
    """Find the blocks of a traced model."""
    reopener = Reopener(traced)
    candidates = _candidates(traced.graph_module.graph)
    found: list[Block] = []
    skipped: list[Skipped] = []
    for candidate in candidates:
        try:
            found.append(_as_block(candidate, reopener))
        except Refusal as e:
            skipped.append(Skipped(candidate.name, candidate.kind, str(e)))
    examiner = Examiner(traced, reopener, found, check)
    passed: list[Block] = []
    for block in found:
        try:
            examiner.examine(block)
            passed.append(block)
        except Refusal as e:
            skipped.append(Skipped(block.name, block.kind, str(e)))
    order = tuple(c.name for c in candidates)
    return Blocks(tuple(passed), tuple(sorted(skipped, key=lambda s: order.index(s.name))), order)


@dataclass
class _Module:
    """One call of one module in the trace."""

    name: str
    kind: str
    nodes: list[fx.Node]

    def is_inside(self, other: _Module) -> bool:
        return self.path.startswith(other.path + ".") and self.nodes[0] in other.members

    @property
    def path(self) -> str:
        """The module's path, without the number of a repeated call."""
        return self.name.partition("@")[0]

    @cached_property
    def members(self) -> set[fx.Node]:
        return set(self.nodes)


def _as_block(candidate: _Module, reopener: Reopener) -> Block:
    analysis = analyse(candidate.nodes)
    if not analysis.fixed:
        return Block(candidate.name, candidate.kind, candidate.nodes, analysis)
    reopened = reopener.reopen(candidate.name, candidate.nodes, analysis)
    return Block(candidate.name, candidate.kind, candidate.nodes, reopened.analysis, reopened)


def _modules(graph: fx.Graph) -> list[_Module]:
    """Every module call that the trace names, with its nodes."""
    found: dict[str, _Module] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            # A repeated call of one module carries its number in the key.
            path = f"{path}@{key.rpartition('@')[2]}" if "@" in str(key) and path and "@" not in path else path
            if path:
                name = kind if isinstance(kind, str) else kind.__qualname__
                found.setdefault(path, _Module(path, name.rsplit(".", 1)[-1], [])).nodes.append(node)
    return list(found.values())


def _listed(graph: fx.Graph) -> list[_Module]:
    """Entries of lists of modules, which are never called themselves: a loop around them calls what they hold."""
    called = {m.path for m in _modules(graph)}
    found: dict[str, _Module] = {}
    repeated: set[str] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            parts = path.split(".")
            for end in range(1, len(parts)):
                entry = ".".join(parts[:end])
                if parts[end - 1].isdigit() and entry not in called:
                    nodes = found.setdefault(entry, _Module(entry, "ModuleList", [])).nodes
                    nodes += [node] if nodes[-1:] != [node] else []
                    repeated |= {entry} if "@" in f"{key}{path}" else set()
    return [m for m in found.values() if m.name not in repeated]


def _candidates(graph: fx.Graph) -> list[_Module]:
    """The outermost modules that repeat and hold a residual sum; a container of such is no block itself."""
    chosen = _repeating(_modules(graph)) or _repeating(_modules(graph), permuted=True)
    for m in _repeating(_listed(graph)):
        if not any(m.is_inside(c) or c.is_inside(m) for c in chosen):
            chosen.append(m)
    order = {n: i for i, n in enumerate(graph.nodes)}
    return sorted(chosen, key=lambda m: order[m.nodes[0]])


def _repeating(modules: list[_Module], permuted: bool = False) -> list[_Module]:
    modules = [m for m in modules if _has_residual(m, permuted)]
    siblings: dict[tuple[str, str], int] = defaultdict(int)
    for m in modules:
        siblings[m.name.rpartition(".")[0], m.kind] += 1
    alike = [
        m
        for m in modules
        if re.fullmatch(r"\d+(@\d+)?", m.name.rpartition(".")[2]) or siblings[m.name.rpartition(".")[0], m.kind] > 1
    ]
    chosen: list[_Module] = []
    for m in sorted(alike, key=lambda m: m.name.count(".")):
        if not any(m.is_inside(c) for c in chosen) and not _contains_blocks(m, alike):
            chosen.append(m)
    return chosen


def _contains_blocks(module: _Module, others: list[_Module]) -> bool:
    """Whether it is a container: it holds alike residual modules, and they hold whatever attention it has."""
    attends = _attends(module)
    kinds: dict[str, int] = defaultdict(int)
    for other in others:
        if other.is_inside(module) and (_attends(other) or not attends):
            kinds[other.kind] += 1
    return any(count > 1 for count in kinds.values())


def _attends(module: _Module) -> bool:
    return any("softmax" in name_of(n) or name_of(n) == "scaled_dot_product_attention" for n in module.nodes)


def _has_residual(module: _Module, permuted: bool = False) -> bool:
    """Whether it sums two values of its output's shape (or of that shape permuted), one of them made outside or by
    another sum.
    """
    inside = set(module.nodes)
    if not any(name_of(n) in _PRODUCTS for n in module.nodes):
        return False  # without a product there is nothing to save

    def laid_out(n: fx.Node) -> Any:
        return frozenset(Counter(shape_of(value_of(n))).items()) if permuted else shape_of(value_of(n))

    outputs = {laid_out(n) for n in module.nodes if any(u not in inside for u in n.users)}
    return any(
        name_of(n) in ("add", "add_")
        and laid_out(n) in outputs
        and sum(
            isinstance(a, fx.Node) and shape_of(value_of(a)) == shape_of(value_of(n)) and a.op != "get_attr"
            for a in n.args
        )
        == 2
        and len(shape_of(value_of(n))) >= 3
        for n in module.nodes
    )
