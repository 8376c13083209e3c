"""Find the residual blocks of a traced model, and say why each other candidate cannot be routed."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

from torch import fx, nn
from torch.export import ExportedProgram

from modpass.alone import branch_alone
from modpass.analysis import Analysis, analyse
from modpass.examine import Examiner
from modpass.mixing import name_of
from modpass.parts import Parts, find_cut
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
    """A block that can be routed: its module path, class name, and what the analysis found.

    branch: the part, "attention" or "mlp", that the analysis is of, where no more of the block can be routed.
    """

    name: str
    kind: str
    nodes: list[fx.Node] = field(repr=False)
    analysis: Analysis = field(repr=False)
    reopened: Reopened | None = field(default=None, repr=False)
    branch: Literal["attention", "mlp"] | None = None

    @property
    def ends(self) -> tuple[fx.Node, fx.Node]:
        """The nodes of the whole model's graph between which it lies."""
        if self.reopened is None:
            return self.analysis.stream, self.analysis.output
        return self.reopened.outer[self.analysis.stream], self.replaced

    @property
    def replaced(self) -> fx.Node:
        """The node of the whole model's graph whose value it computes."""
        if self.reopened is None:
            return self.analysis.output
        inside = set(self.nodes)
        last = (n for n in reversed(self.nodes) if any(u not in inside for u in n.users))
        return self.reopened.replaced or next(last)

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
    """A candidate that cannot be routed, and the reason; parts: what of it can, "mlp" or "attention"."""

    name: str
    kind: str
    reason: str
    parts: tuple[str, ...] = ()


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


def locate(traced: Traced, check: bool | None = None, parts: Parts = "block") -> Blocks:
    """Find the blocks of a traced model whose ``parts`` can be routed."""
    reopener = Reopener(traced)
    candidates = _candidates(traced.graph_module.graph)

    def sift(modules: list[_Module], make: Callable[[_Module], Block]) -> tuple[list[Block], dict[str, str]]:
        return _sifted(modules, make, lambda found: Examiner(traced, reopener, found, check))

    whole, refused = sift(candidates, lambda m: _as_block(m, reopener))
    left = [m for m in candidates if m.name in refused]
    if parts == "block":
        able = {kind: sift(left, partial(_as_part, kind, reopener))[0] for kind in ("mlp", "attention")}
        ways = {m.name: tuple(k for k, found in able.items() if m.name in {b.name for b in found}) for m in left}
        passed, reasons = whole, {n: reason + _hint(ways[n]) for n, reason in refused.items()}
    else:
        ways, reasons = {}, {b.name: f"parts='{parts}': {e}" for b in whole if (e := _inseparable(b, parts))}
        branches, others = sift(left, partial(_as_part, parts, reopener))
        passed = [*(b for b in whole if b.name not in reasons), *branches]
        reasons |= {n: refused[n] if refused[n] == r else f"parts='{parts}': {r}" for n, r in others.items()}
    order = tuple(c.name for c in candidates)
    skipped = [Skipped(m.name, m.kind, reasons[m.name], ways.get(m.name, ())) for m in candidates if m.name in reasons]
    return Blocks(tuple(sorted(passed, key=lambda b: order.index(b.name))), tuple(skipped), order)


def _sifted(
    modules: list[_Module], make: Callable[[_Module], Block], examiner: Callable[[list[Block]], Examiner]
) -> tuple[list[Block], dict[str, str]]:
    """The blocks made of modules that pass the check by values, and the reason for each other."""
    made, passed, refused = list[Block](), list[Block](), dict[str, str]()
    for module in modules:
        try:
            made.append(make(module))
        except Refusal as e:
            refused[module.name] = str(e)
    check = examiner(made)
    for block in made:
        try:
            check.examine(block)
            passed.append(block)
        except Refusal as e:
            refused[block.name] = str(e)
    return passed, refused


def _hint(ways: tuple[str, ...]) -> str:
    """What can be routed of a block that is refused as a whole."""
    names = {"mlp": "MLP", "attention": "attention"}
    return "".join(f"; its {names[way]} branch can be routed: parts='{way}'" for way in ways)


def _inseparable(block: Block, parts: Parts) -> str:
    """Why a part of a block cannot be routed by itself, or nothing."""
    try:
        find_cut(block.analysis, parts)
    except Refusal as e:
        return str(e)
    return ""


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


def _as_part(kind: Literal["mlp", "attention"], reopener: Reopener, candidate: _Module) -> Block:
    analysis, reopened = branch_alone(candidate.name, candidate.nodes, kind, reopener)
    return Block(candidate.name, candidate.kind, candidate.nodes, analysis, reopened, kind)


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
