"""``mod_transform``: trace, find, route."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from modpass.analysis import Analysis
from modpass.blocks import Block, Blocks, locate
from modpass.calling import InputCheck
from modpass.dropout import switch_dropout
from modpass.errors import BlockError, InputError
from modpass.functional import check_capacity
from modpass.model import Info, InputSpec, RoutedModel
from modpass.parts import Parts, cut_out, find_cut, with_part
from modpass.rewrite import Body, drop_inputs, outline, replace_call, splice
from modpass.routing import Gate, RoutedBlock, Selection, choose_option
from modpass.symbols import expr_of, hint_of, shape_of, value_of
from modpass.tracing import Traced, capture

__all__ = ["mod_transform", "trace"]

Chosen = Iterable[str] | Callable[[Block], bool]  # a text is one name, or "auto"


def mod_transform(
    model: nn.Module | ExportedProgram,
    capacity: float | Mapping[str, float] = 0.125,
    *,
    every: int = 2,
    blocks: Chosen | None = None,
    gate: Gate = "linear",
    selection: Selection = "expert_choice",
    example_inputs: Any = None,
    padding_mask: str = "attention_mask",
    parts: Parts = "block",
    check: bool | None = None,
    predictor: bool = False,
    checkpoint: bool = False,
    budget: float | None = None,
    calibration: Iterable[Any] | None = None,
    generator: torch.Generator | None = None,
) -> RoutedModel:
    """Turn a model into a Mixture-of-Depths model (arXiv 2404.02258); the model itself is left as it was.

    Args:
        model: an ``nn.Module``, a ``torch.export.ExportedProgram`` or a ``torch.fx.GraphModule``.
        capacity: the share of the sequence that goes through a routed block, in (0, 1], or a share per block name.
        every: route every ``every``-th block of a stack, starting with the ``every``-th (the paper: 2).
        blocks: names of blocks, or a predicate on the found blocks, instead of ``every``. "auto": those that cost
            least, with routers fitted, by ``modpass.training.calibrate``; needs ``budget`` and ``calibration``.
        gate: what the block's change is multiplied by: "linear" r = w . x (the paper), "sigmoid", or "unit" (1).
        selection: "expert_choice" (top-k of the router) or "stochastic" (top-k of noise, the paper's control).
        example_inputs: a tuple, a dict or ``(tuple, dict)``; may be left out where the model says what it takes.
        padding_mask: the ``[batch, sequence]`` input whose zeros are padding, which never takes a slot from a
            real token; "~name" where its ones are.
        parts: "block" routes a whole block; "attention" or "mlp" routes only that residual branch of it.
        check: run blocks on the example inputs with their tokens permuted and some left out, and refuse one whose
            tokens meet outside attention. None: blocks that hold an operator unknown to modpass; True: every
            block; False: none, and unknown operators are refused.
        predictor: give each routed block a small MLP that decides in its router's place under "causal"
            selection; ``modpass.training.routing_losses`` trains it, without a gradient into the model.
        checkpoint: run the body of a routed block again in the backward pass instead of keeping what it computed.
        budget: for "auto", the share of the dense model's operations that may remain.
        calibration: for "auto", the batches to calibrate on.
        generator: draws the noise of "stochastic".

    Returns:
        A graph module that is called like the model, shares its parameters by name and storage, and adds
        ``<block>.router.weight`` of shape ``[D]`` (and ``<block>.predictor.*``) to each routed block.

    Raises:
        InputError: an argument is not what is allowed.
        TraceError: the model cannot be traced.
        BlockError: a named block cannot be routed, or none was found.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> list(mod_transform(encoder, 0.5, example_inputs=(torch.randn(2, 6, 8),)).routed_blocks)
    ['layers.1']
    """
    choose_option("gate", gate, Gate)
    choose_option("selection", selection, Selection)
    choose_option("parts", parts, Parts)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise InputError(f"every is {every!r}; it must be a whole number of 1 or more")
    if not isinstance(capacity, Mapping):
        check_capacity(capacity)
    if (blocks == "auto") != (budget is not None) or (budget is None) != (calibration is None):
        raise InputError('blocks="auto", budget= and calibration= belong together; give all three or none')
    if budget is not None and calibration is not None:
        from modpass.training.auto import route_within  # which needs this module

        options: dict[str, Any] = {"gate": gate, "selection": selection, "example_inputs": example_inputs}
        options |= {"padding_mask": padding_mask, "parts": parts, "check": check, "predictor": predictor}
        options |= {"checkpoint": checkpoint, "generator": generator}
        return route_within(model, calibration, budget, capacity, **options)
    traced = capture(model, example_inputs)
    found = with_part(locate(traced, check), parts)
    picked = _pick(found, every, blocks)
    capacities = _capacities(capacity, picked, found)
    settings: dict[str, Any] = {"capacity": capacities, "gate": gate, "selection": selection}
    settings |= {"padding_mask": padding_mask, "parts": parts, "predictor": predictor}
    info = _info(traced, found, settings)
    mask = _PaddingMask(traced, padding_mask, found)
    keeper = _parameters(traced)
    _route(
        traced.graph_module,
        picked,
        parts,
        lambda plan: _routed_block(plan, capacities[plan.name], gate, selection, predictor),
        mask,
    )
    result = _finish(traced, info, keeper)
    for block in result.routed_blocks.values():
        block.checkpoint = checkpoint
    return result.seed(generator)


def trace(model: nn.Module | ExportedProgram, example_inputs: Any = None) -> RoutedModel:
    """The dense model through the very same path: a ``RoutedModel`` with no routed block.

    Raises:
        TraceError: the model cannot be traced.
        InputError: no example inputs were given and the model does not say what it takes.

    >>> trace(nn.Linear(3, 3), (torch.randn(2, 3),)).routed_blocks
    {}
    """
    traced = capture(model, example_inputs)
    return _finish(traced, _info(traced, locate(traced), {}), _parameters(traced))


# Choose blocks


def _pick(found: Blocks, every: int, chosen: Chosen | None) -> list[Block]:
    if not found.found:
        raise BlockError(
            f"no block can be routed:\n{found}"
            if found.skipped
            else "no block was found: no module repeats and sums its input with its output",
            found.skipped,
        )
    if chosen is None:
        stacks: dict[str, list[Block]] = defaultdict(list)
        for block in found:
            stacks[block.group].append(block)
        picked = [b for stack in stacks.values() for b in stack[every - 1 :: every]]
    elif callable(chosen):
        picked = [b for b in found if chosen(b)]
    else:
        picked = _by_name(found, [chosen] if isinstance(chosen, str) else list(chosen))
    if not picked:
        raise BlockError(f"no block is left to route (every={every}); there are: {', '.join(found.names())}")
    order = {b.name: i for i, b in enumerate(found)}
    return sorted(picked, key=lambda b: order[b.name])


def _by_name(found: Blocks, names: list[str]) -> list[Block]:
    blocks, refused = {b.name: b for b in found}, {s.name: s.reason for s in found.skipped}
    for name in names:
        if name in refused:
            raise BlockError(f"block '{name}' cannot be routed: {refused[name]}")
        if name not in blocks:
            raise BlockError(f"there is no block '{name}'; there are: {', '.join(blocks)}")
    return [blocks[n] for n in dict.fromkeys(names)]


def _capacities(capacity: float | Mapping[str, float], picked: list[Block], found: Blocks) -> dict[str, float]:
    if not isinstance(capacity, Mapping):
        return {b.name: check_capacity(capacity) for b in picked}
    unknown = [n for n in capacity if n not in found.names()]
    missing = [b.name for b in picked if b.name not in capacity]
    if unknown or missing:
        raise BlockError(
            f"capacity names no such block: {', '.join(unknown)}"
            if unknown
            else f"capacity has no entry for the routed block {', '.join(missing)}"
        )
    return {b.name: check_capacity(capacity[b.name], f"block '{b.name}'") for b in picked}


# Route


class _PaddingMask:
    """The node that says which tokens are real, for a stream of given sizes."""

    def __init__(self, traced: Traced, name: str, found: Blocks) -> None:
        self.graph, self.inverted = traced.graph_module.graph, name.startswith("~")
        plain = name.removeprefix("~")
        named = [n for n in self.graph.nodes if n.op == "placeholder" and isinstance(value_of(n), Tensor)]
        self.nodes = [n for n in named if str(n.target) == plain or str(n.target).endswith(f"_{plain}")]
        self.nodes = [n for n in self.nodes if value_of(n).dim() == 2]
        tied = {b.analysis.sizes.sequence for b in found}
        self.loose = {n for n in self.nodes if expr_of(value_of(n).shape[1]) not in tied}
        if plain != "attention_mask" and not self.nodes:
            raise InputError(
                f"padding_mask '{plain}' is no traced input; there are: {', '.join(str(n.target) for n in named)}"
            )

    def of(self, analysis: Analysis) -> fx.Node | None:
        """The mask of a stream with these sizes, nonzero where a token is real."""
        node = next((n for n in self.nodes if self._fits(n, analysis)), None)
        if node is not None and value_of(node).is_floating_point():
            raise InputError(
                f"padding_mask '{node.target}' is a {value_of(node).dtype} tensor, which may be additive; "
                "give a bool or integer mask that is nonzero at real tokens"
            )
        if node is None or not self.inverted:
            return node
        with self.graph.inserting_before(next(u for u in self.graph.nodes if u.op not in ("placeholder", "get_attr"))):
            return self.graph.call_function(torch.ops.aten.logical_not.default, (node,))

    def _fits(self, node: fx.Node, analysis: Analysis) -> bool:
        """Same sizes as the stream; in the example, where the model itself never brings the two together."""
        length = value_of(node).shape[1]
        if node not in self.loose:
            return bool(expr_of(length) == analysis.sizes.sequence)
        return hint_of(length) == hint_of(value_of(analysis.stream).shape[analysis.seq_dim])


@dataclass(frozen=True)
class _Plan:
    """One block ready to be replaced: all bodies are copied out before the first call is put in."""

    name: str
    analysis: Analysis
    body: Body


def _route(
    graph_module: fx.GraphModule,
    blocks: list[Block],
    parts: Parts,
    make: Callable[[_Plan], RoutedBlock],
    mask: _PaddingMask,
) -> None:
    moved: dict[fx.Node, fx.Node] = {}
    plans = [_plan(graph_module, block, parts, moved) for block in blocks]
    for plan in plans:
        analysis = plan.analysis
        outer = [analysis.stream, mask.of(analysis), *(s.node for s in plan.body.sides)]
        arguments = tuple(None if n is None else moved.get(n, n) for n in outer)
        _install(graph_module, plan.name, make(plan))
        moved[analysis.output] = replace_call(graph_module.graph, plan.name, analysis, arguments)


def _plan(graph_module: fx.GraphModule, block: Block, parts: Parts, moved: dict[fx.Node, fx.Node]) -> _Plan:
    analysis = block.analysis
    if parts != "block":
        analysis = cut_out(analysis, find_cut(analysis, parts))
    if block.reopened is not None:
        inside = set(block.nodes)
        old = next(n for n in reversed(block.nodes) if any(u not in inside for u in n.users))
        env = splice(graph_module, block.name, old, block.reopened, moved)
        analysis = _translate(analysis, env)
        moved[old] = env[block.analysis.output]
    return _Plan(block.name, analysis, outline(block.name, analysis))


def _translate(analysis: Analysis, env: Mapping[fx.Node, fx.Node]) -> Analysis:
    """The analysis of a reopened block, said of its copy in the whole model's graph."""
    gathers = {(env[n], env[s]): g for (n, s), g in analysis.gathers.items()}
    return Analysis(
        env[analysis.stream],
        env[analysis.output],
        analysis.sizes,
        analysis.seq_dim,
        analysis.width,
        [env[n] for n in analysis.tokens],
        [env[n] for n in analysis.hoisted],
        gathers,
    )


def _routed_block(plan: _Plan, capacity: float, gate: str, selection: str, predictor: bool) -> RoutedBlock:
    analysis, body = plan.analysis, plan.body
    switch_dropout(body.graph_module)
    body.graph_module.recompile()
    routed = RoutedBlock(
        plan.name,
        body.graph_module,
        analysis.width,
        capacity=capacity,
        gate=gate,
        selection=selection,
        gathers=[s.gather for s in body.sides],
        owned=body.owned,
        seq_dim=analysis.seq_dim if analysis.order is None else 1,
        predictor=predictor,
        device=value_of(analysis.stream).device,
    )
    routed.order = analysis.order
    return routed


def _install(graph_module: fx.GraphModule, name: str, routed: RoutedBlock) -> None:
    parent_path, _, leaf = name.rpartition(".")
    parent: nn.Module = graph_module
    for part in filter(None, parent_path.split(".")):
        if part not in parent._modules:
            parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    if leaf in parent._modules:
        routed.adopt(parent.get_submodule(leaf))
    parent._modules[leaf] = routed


# Finish


def _parameters(traced: Traced) -> dict[str, Tensor]:
    """Parameters and persistent buffers by every name they have, tied ones too."""
    source = traced.module if traced.module is not None else traced.graph_module
    return source.state_dict(keep_vars=True)


def _finish(traced: Traced, info: Info, keep: Mapping[str, Tensor]) -> RoutedModel:
    graph_module = traced.graph_module
    drop_inputs(graph_module.graph, set(traced.call.constants))
    switch_dropout(graph_module)
    graph_module.graph.lint()
    result = RoutedModel(graph_module, graph_module.graph, info)
    for path, holder in result.named_modules():
        prefix = f"{path}." if path else ""
        holder._non_persistent_buffers_set |= {n for n in holder._buffers if prefix + n not in keep}
    for name, value in keep.items():
        _keep(result, name, value)
    return result.train(traced.module.training if traced.module is not None else False)


def _keep(module: nn.Module, path: str, value: Tensor) -> None:
    """Register a parameter that the graph itself does not read, such as the second name of a tied weight."""
    *parents, leaf = path.split(".")
    for part in parents:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    if isinstance(value, nn.Parameter):
        module._parameters[leaf] = value
        module._buffers.pop(leaf, None)
    elif leaf not in module._parameters:
        module._buffers[leaf] = value


def _info(traced: Traced, found: Blocks, settings: dict[str, Any]) -> Info:
    placeholders = [n for n in traced.graph_module.graph.nodes if n.op == "placeholder"]
    examples = pytree.tree_leaves(list(traced.examples.values()))
    names = _size_names(placeholders, found)
    batch = next((e for e, n in names.items() if n == "batch"), None)
    sizes: list[Any] = [size for n in placeholders for size in getattr(value_of(n), "shape", ())]
    rows = next((hint_of(size) for size in sizes if batch is not None and expr_of(size) == batch), None)
    inputs = []
    for node, example in zip(placeholders, examples, strict=True):
        value = value_of(node)
        _same_batch(value, names, rows)
        if isinstance(value, Tensor):
            dims = tuple(
                int(e) if e.is_Integer else names.setdefault(e, f"{node.target}.{i}")
                for i, e in enumerate(shape_of(value))
            )
            inputs.append(InputSpec(str(node.target), dims, value.dtype, example))
            bounds = tuple(traced.ranges.get(e, (1, None)) for e in shape_of(value))
            if str(node.target) in traced.call.structure:
                traced.call.checks[str(node.target)] = InputCheck(dims, bounds)
    return Info(
        traced.call, traced.out_spec, tuple(inputs), _output_names(traced), settings, _source(traced), found.skipped
    )


def _size_names(placeholders: list[fx.Node], found: Blocks) -> dict[Any, str]:
    """Names of the free sizes: those of the first block's stream, or of the first input's first two dims."""
    sizes = next((b.analysis.sizes for b in found if b.reopened is None), None)
    if sizes is not None:
        return {sizes.sequence: "sequence", sizes.batch: "batch"}
    first = shape_of(value_of(placeholders[0]))[:2] if placeholders else ()
    return {e: name for e, name in zip(first, ("batch", "sequence"), strict=False) if e.is_Symbol}


def _same_batch(value: Any, names: dict[Any, str], rows: int | None) -> None:
    """Let an input whose batch merely broadcasts (a mask) share the batch's name, told by its example size."""
    batch = next((e for e, n in names.items() if n == "batch"), None)
    shape = shape_of(value)
    if batch is None or batch in shape or not isinstance(value, Tensor):
        return
    given: Any = value.shape
    hints = {e: hint_of(size) for e, size in zip(shape, given, strict=True) if e.is_Symbol}
    alike = [e for e in shape[:2] if e in hints and hints[e] == rows and e not in names]
    if alike:
        names[alike[0]] = "batch"


def _output_names(traced: Traced) -> tuple[str, ...]:
    """Names of the tensor outputs, in order; an output that is None has none."""
    output = next(n for n in traced.graph_module.graph.nodes if n.op == "output")
    leaves = pytree.tree_leaves(output.args, is_leaf=lambda a: a is None)
    spec = traced.out_spec
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    if isinstance(tree, Mapping):
        parts = [(str(k), pytree.tree_leaves(v)) for k, v in tree.items()]
        names = {i: name if len(part) == 1 else f"{name}.{n}" for name, part in parts for n, i in enumerate(part)}
    else:
        names = {i: "output" if spec.num_leaves == 1 else f"output.{i}" for i in range(spec.num_leaves)}
    taken = {str(n.target) for n in traced.graph_module.graph.nodes if n.op == "placeholder"}
    found = [names[i] for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node) and i in names]
    return tuple(f"{name}.out" if name in taken else name for name in found)


def _source(traced: Traced) -> dict[str, Any]:
    """How to build the dense model again: a Hugging Face class and configuration, where it has one."""
    if isinstance(traced.module, RoutedModel):
        return traced.module.info.source
    config = getattr(traced.module, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        return {"kind": "huggingface", "class": type(traced.module).__name__, "config": config.to_dict()}
    return {
        "kind": "module",
        "class": type(traced.module).__qualname__ if traced.module is not None else None,
    }
