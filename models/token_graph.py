"""What of a token's graph is joined before it becomes kernels: sums after products, and products of the same vector.

A pass over torch.compile's graph sees them in every model, however its layers are written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import getitem
from typing import Any

import torch
import torch._inductor.config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from models.matrix_vector import MOST_MATRICES


def join_operators() -> None:
    """Let torch.compile apply the pass to all that it compiles, which changes nothing but our own operators: in the
    calling thread, because on torch 2.13 settings belong to one. A pass that somebody else has set stays, and is the
    only one."""
    if torch._inductor.config.post_grad_custom_pre_pass is None:
        torch._inductor.config.post_grad_custom_pre_pass = JoinOperators()


class JoinOperators(CustomGraphPass):
    """`residual + matrix_vector(…)` as one operator, then products of plain matrices with the same vector as one."""

    def __call__(self, graph: Graph) -> None:
        """Change `graph`, as it is after differentiation, in place."""
        for node in _products(graph):
            _join_sum(node)
        together: dict[tuple[Node, torch.dtype], list[Node]] = defaultdict(list)
        for node in _products(graph):
            vector, matrix, scale, bias, residual = _arguments(node)
            # A parameter is there before any of them is computed.
            are_there = all(one is None or one.op == "placeholder" for one in (matrix, bias))
            if are_there and scale is None and residual is None:
                together[vector, matrix.meta["val"].dtype].append(node)
        for nodes in together.values():
            for first in range(0, len(nodes), MOST_MATRICES):
                _join_products(nodes[first : first + MOST_MATRICES])

    def uuid(self) -> Any:
        """What torch's cache distinguishes graphs by."""
        return get_hash_for_files((__file__,))


def _products(graph: Graph) -> Iterable[Node]:
    return graph.find_nodes(op="call_function", target=torch.ops.text.matrix_vector.default)


def _arguments(node: Node) -> tuple[Any, ...]:
    """vector, matrix, scale, bias, residual."""
    return (*node.args, *(None,) * (5 - len(node.args)))


def _join_sum(product: Node) -> None:
    """Let a product add what its only user adds to it."""
    users = list(product.users)
    if len(users) != 1 or users[0].target is not torch.ops.aten.add.Tensor or users[0].kwargs:
        return
    total = users[0]
    others = [term for term in total.args if term is not product]
    is_joined = _arguments(product)[4] is not None
    if is_joined or len(others) != 1 or not isinstance(others[0], Node) or not _are_alike(product, total, others[0]):
        return
    with total.graph.inserting_before(total):
        joined = total.graph.call_function(torch.ops.text.matrix_vector.default, (*_arguments(product)[:4], others[0]))
    joined.meta = _described(total, total.meta["val"])
    total.replace_all_uses_with(joined)
    total.graph.erase_node(total)
    product.graph.erase_node(product)


def _are_alike(*nodes: Node) -> bool:
    values = [node.meta.get("val") for node in nodes]
    return all(isinstance(value, torch.Tensor) for value in values) and (
        len({(value.shape, value.dtype, value.device) for value in values}) == 1  # type: ignore[union-attr]
    )


def _described(origin: Node, value: Any) -> dict[str, Any]:
    """What torch.compile wants to know of a new node. The rest of `origin`'s is about its own arguments."""
    trace = origin.meta.get("stack_trace")
    return {"val": value} if trace is None else {"val": value, "stack_trace": trace}


def _join_products(products: list[Node]) -> None:
    """Let one operator give what several give, in place of the first of them. Biases are added afterwards, by whatever
    kernel uses the product."""
    if len(products) < 2:
        return
    first = products[0]
    graph = first.graph
    vector = first.args[0]
    with graph.inserting_before(first):
        joined = graph.call_function(
            torch.ops.text.matrix_vectors.default, (vector, [product.args[1] for product in products])
        )
        joined.meta = _described(first, [product.meta["val"] for product in products])
        for number, product in enumerate(products):
            one = graph.call_function(getitem, (joined, number))
            one.meta = _described(product, product.meta["val"])
            if (bias := _arguments(product)[3]) is not None:
                one = graph.call_function(torch.ops.aten.add.Tensor, (one, bias))
                one.meta = _described(product, product.meta["val"])
            product.replace_all_uses_with(one)
    for product in products:
        graph.erase_node(product)
