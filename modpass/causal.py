"""Causal selection: a token is decided by itself, so that nothing it computes depends on later tokens.

The first k tokens that pass take the k slots in order; what slots are left over hold no token. Shapes stay fixed
without any top-k. Shapes: B batch, S sequence, k slots.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from modpass.attention import Attentions, arguments_of
from modpass.attention_find import find_attention
from modpass.dropout import copy_graph
from modpass.mixing import SOFTMAX, name_of
from modpass.sizes import Refusal, Sizes
from modpass.symbols import expr_of, shape_of, value_of

__all__ = ["causal_body", "causal_slots", "hide_unused", "mask_unused"]


def causal_slots(passes_BS: Tensor, k: int) -> Tensor:
    """The positions ``[B, k]`` (int64) of the first k tokens that pass ``[B, S]``, in order; a free slot holds S.

    A token that finds every slot taken passes the block by, as does one that is not chosen (paper section 3.5
    decides causally; the fixed slots are ours).

    >>> causal_slots(torch.tensor([[False, True, False, True, True]]), 2).tolist()
    [[1, 3]]
    >>> causal_slots(torch.tensor([[False, True, False]]), 2).tolist()
    [[1, 3]]
    """
    B, S = passes_BS.shape
    order_BS = passes_BS.to(torch.int64).cumsum(1) - 1
    slot_BS = torch.where(passes_BS & (order_BS < k), order_BS, S)
    place_BS = torch.arange(S, device=passes_BS.device).unsqueeze(0).expand(B, S)
    # As long as what is scattered, which TensorRT asks for; the last place takes what finds no slot.
    free = torch.full((B, S + 1), S, dtype=torch.int64, device=passes_BS.device)
    return free.scatter(1, slot_BS, place_BS)[:, :k]


def causal_body(body: fx.GraphModule, seq_dim: int) -> fx.GraphModule:
    """A copy of a routed block's body that takes ``used_Bk`` last and hides the keys of unused slots.

    Raises:
        Refusal: its attention cannot be followed; says where.
    """
    graph = copy_graph(body)
    stream = next(n for n in graph.nodes if n.op == "placeholder")
    shape = value_of(stream).shape
    if len(shape) != 3:
        raise Refusal("it runs several streams side by side, which causal selection does not follow")
    sizes = Sizes(expr_of(shape[1 - seq_dim]), expr_of(shape[seq_dim]))
    tokens = dependent(graph, stream)
    attentions = find_attention(tokens, sizes.carries)
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        used = graph.placeholder("used")
    for attention in attentions.found:
        if attention.fused:
            _hide_in_fused(graph, attention.node, used)
    for node in _ranked(tokens, attentions, sizes):
        with graph.inserting_before(node):
            scores = graph.call_function(hide_unused, (node.args[0], used))
        scores.meta = dict(node.args[0].meta)  # type: ignore[union-attr]
        node.args = (scores, *node.args[1:])
    return fx.GraphModule(body, graph, "CausalBody")


def dependent(graph: fx.Graph, *sources: fx.Node) -> list[fx.Node]:
    """The tensor nodes that depend on ``sources``, in order."""
    found: dict[fx.Node, None] = dict.fromkeys(sources)
    for node in graph.nodes:
        plain = node.op in ("placeholder", "output") or name_of(node) == "sym_size"
        if not plain and any(a in found for a in node.all_input_nodes):
            found[node] = None
    return [n for n in found if n not in sources]


def _ranked(tokens: list[fx.Node], attentions: Attentions, sizes: Sizes) -> list[fx.Node]:
    """Where scores are weighed or ranked by their keys; attention that is written out must have such a place."""
    found = [n for n in tokens if attentions.ranked(n)]
    if not any(name_of(n) in SOFTMAX for n in found) and any(not a.fused for a in attentions.found):
        first = next(a for a in attentions.found if not a.fused)
        raise Refusal(f"the attention at node {first.node.name} has no softmax, so that a key cannot be hidden in it")
    for node in found:
        scores: Any = node.args[0]
        if not sizes.carries(shape_of(value_of(scores))[-2]):
            raise Refusal(
                f"the scores at node {scores.name} do not end in queries and keys, so that none can be hidden"
            )
    return found


def _hide_in_fused(graph: fx.Graph, node: fx.Node, used: fx.Node) -> None:
    given = arguments_of(node)
    if given.get("is_causal"):
        return  # slots are in order of position and unused ones come last, where no used slot looks
    with graph.inserting_before(node):
        mask = graph.call_function(mask_unused, (given.get("attn_mask"), used, given["query"]))
    query, key, value = given.pop("query"), given.pop("key"), given.pop("value")
    node.args, node.kwargs = (query, key, value), {**given, "attn_mask": mask}


def _allowed(used_Bk: Tensor) -> Tensor:
    """Who sees whom, ``[B, k, k]``: used slots, and each slot itself, so that no row is empty."""
    k = used_Bk.shape[1]
    return used_Bk.unsqueeze(1) | torch.eye(k, dtype=torch.bool, device=used_Bk.device)


def _placed(seen_Bkk: Tensor, rows: int, dims: int) -> Tensor:
    """Pairs of slots as scores of ``dims`` dims and so many rows have them, also where heads are merged into rows."""
    B, *pair = seen_Bkk.shape
    seen = seen_Bkk.repeat_interleave(rows // B, 0) if rows != B else seen_Bkk
    return seen.reshape(rows, *[1] * (dims - 3), *pair)


def hide_unused(scores: Tensor, used_Bk: Tensor) -> Tensor:
    """Scores ``[B, .., k, k]`` (or with rows of heads merged into B, or keys appended) without the unused slots.

    >>> hide_unused(torch.zeros(1, 2, 2), torch.tensor([[True, False]]))[0, 0, 1].item() < -1e30
    True
    """
    k = used_Bk.shape[1]
    seen = _placed(F.pad(_allowed(used_Bk), (0, scores.shape[-1] - k), value=True), scores.shape[0], scores.dim())
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min)


def mask_unused(mask: Any, used_Bk: Tensor, query: Tensor) -> Tensor:
    """A mask of fused attention (bool, additive or None) that hides the unused slots as well; ``query [B, .., k, D]``.

    >>> mask_unused(None, torch.tensor([[True, False]]), torch.zeros(1, 2, 8)).tolist()
    [[[True, False], [True, True]]]
    """
    rows, dims = query.shape[0], query.dim()
    seen = _allowed(used_Bk)
    if mask is None:
        return _placed(seen, rows, dims)
    if mask.dtype != torch.bool:
        added: Tensor = mask.masked_fill(~_placed(seen, rows, dims), torch.finfo(mask.dtype).min)
        return added
    own = torch.eye(used_Bk.shape[1], dtype=torch.bool, device=mask.device) & ~used_Bk[:, :, None]
    keys = used_Bk[:, None].expand_as(own)
    both: Tensor = (mask & _placed(keys, rows, dims)) | _placed(own, rows, dims)
    return both
