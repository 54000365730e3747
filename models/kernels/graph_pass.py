"""A pass over torch.compile's graphs that joins operators of a token: sums after products, and products of one vector.

It finds these operators in every model, however the layers are written. torch's interface for such passes is private.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from models.kernels import operators
from models.kernels.operators import MOST_MATRICES


def join_operators() -> None:
    """Let torch.compile apply the pass to every graph that the calling thread compiles.

    The pass changes only our own operators. A pass that other code has set is kept instead. On torch 2.13,
    each thread has its own settings.
    """
    if config.post_grad_custom_pre_pass is None:
        config.post_grad_custom_pre_pass = JoinOperators()


class JoinOperators(CustomGraphPass):
    """Joins `residual + matrix_vector(…)`, then the products of several plain matrices with the same vector."""

    def __call__(self, graph: Graph) -> None:
        """Change a graph in place, after torch.compile has differentiated it."""
        for node in _products(graph):
            _join_sum(node)
        together: dict[tuple[Node, torch.dtype], list[Node]] = defaultdict(list)
        for node in _products(graph):
            product = _Product.of(node)
            # Inputs of the graph exist before the first product; other matrices may be computed later.
            are_inputs = all(one is None or one.op == "placeholder" for one in (product.matrix, product.bias))
            if are_inputs and product.scale is None and product.residual is None:
                together[product.vector, product.matrix.meta["val"].dtype].append(node)
        for nodes in together.values():
            for first in range(0, len(nodes), MOST_MATRICES):
                _join_products(nodes[first : first + MOST_MATRICES])

    def uuid(self) -> Any:
        """The name of this version of the pass, in the keys of compiled graphs."""
        return get_hash_for_files((__file__, operators.__file__))


class _Product(NamedTuple):
    """The arguments of `matrix_vector`."""

    vector: Node
    matrix: Node
    scale: Node | None
    bias: Node | None
    residual: Node | None = None

    @classmethod
    def of(cls, node: Node) -> _Product:
        """The arguments of a call. In torch's graphs, all of them are positional."""
        return cls(*node.args)  # type: ignore[arg-type]


def _products(graph: Graph) -> Iterable[Node]:
    return graph.find_nodes(op="call_function", target=torch.ops.text.matrix_vector.default)


def _join_sum(node: Node) -> None:
    """Move a sum into the product, if the sum is the only user of the product."""
    product, users = _Product.of(node), list(node.users)
    if len(users) != 1 or users[0].target is not torch.ops.aten.add.Tensor or users[0].kwargs:
        return
    total = users[0]
    others = [term for term in total.args if term is not node]
    if product.residual is not None or len(others) != 1 or not _are_alike(node, total, others[0]):
        return
    with total.graph.inserting_before(total):
        arguments = (*product._replace(residual=others[0]),)  # type: ignore[arg-type]
        joined = total.graph.call_function(torch.ops.text.matrix_vector.default, arguments)
    joined.meta = {"val": total.meta["val"]}
    total.replace_all_uses_with(joined)
    total.graph.erase_node(total)
    node.graph.erase_node(node)


def _are_alike(*terms: Any) -> bool:
    """Whether all are tensors of one shape, type and device, with no symbolic size."""
    values = [term.meta.get("val") if isinstance(term, Node) else None for term in terms]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    kinds = [(tuple(value.shape), value.dtype, value.device) for value in values if value is not None]
    return all(isinstance(size, int) for shape, _, _ in kinds for size in shape) and len(set(kinds)) == 1


def _join_products(nodes: list[Node]) -> None:
    """Replace several products by one operator, at the place of the first product.

    Biases become sums after the operator, because they are added to rounded products.
    """
    if len(nodes) < 2:
        return
    products = list(map(_Product.of, nodes))
    graph = nodes[0].graph
    with graph.inserting_before(nodes[0]):
        arguments = (products[0].vector, [product.matrix for product in products])
        joined = graph.call_function(torch.ops.text.matrix_vectors.default, arguments)
        joined.meta = {"val": [node.meta["val"] for node in nodes]}
        for number, (node, product) in enumerate(zip(nodes, products, strict=True)):
            one = graph.call_function(getitem, (joined, number))
            one.meta = {"val": node.meta["val"]}
            if product.bias is not None:
                one = graph.call_function(torch.ops.aten.add.Tensor, (one, product.bias))
                one.meta = {"val": node.meta["val"]}
            node.replace_all_uses_with(one)
    for node in nodes:
        graph.erase_node(node)
