"""What of a token's graph is joined."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from random_texts import greedy, make, prompt
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

import models.kernels
from compile_cache.inductor.function import Precompiled, compile_ahead
from compile_cache.inductor.toolchain import configure_torch
from models.kernels import operators, token_graph
from models.kernels.operators import matrix_vector
from models.kernels.token_graph import JoinOperators, join_operators
from models.text.generation import Generator, Request
from models.text.layers import use_token_layers

JOINED = "text.matrix_vectors.default"
PRODUCT = "text.matrix_vector.default"
SUM = "aten.add.Tensor"


def joined(function, *inputs) -> tuple[GraphModule, Counter]:
    """The graph of a call after the pass, checked to compute the same; and how often it has which operator."""
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    JoinOperators()(traced.graph)
    traced.graph.lint()
    traced.recompile()
    for found, expected in zip(traced(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(found, expected)
    return traced, Counter(str(node.target) for node in traced.graph.nodes)


def vector(size: int = 8) -> torch.Tensor:
    return torch.randn(1, 1, size)


def test_products_of_one_vector_become_one_operator():
    def layer(x, first, second, third, fourth, other):
        plain = [matrix_vector(x, one, None, None) for one in (first, second, third, fourth)]
        return (*plain, matrix_vector(plain[0], other, None, None))

    matrices = [torch.randn(rows, 8) for rows in (5, 3, 4, 2)]
    _, counts = joined(layer, vector(), *matrices, torch.randn(6, 5))
    assert (counts[JOINED], counts[PRODUCT]) == (1, 2), "at most three in one"


def test_their_biases_are_added_to_them():
    def layer(x, first, second, bias):
        return matrix_vector(x, first, None, bias), matrix_vector(x, second, None, None)

    _, counts = joined(layer, vector(), torch.randn(5, 8), torch.randn(3, 8), torch.randn(5))
    assert (counts[JOINED], counts[PRODUCT], counts[SUM]) == (1, 0, 1)


def test_scaled_and_computed_matrices_stay_alone():
    def layer(x, first, second, scale):
        scaled = matrix_vector(x, first, scale, None)
        return scaled, matrix_vector(x, second, None, None), matrix_vector(x, second * 2, None, None)

    matrix = torch.randint(-9, 9, (5, 8), dtype=torch.int8)
    _, counts = joined(layer, vector(), matrix, torch.randn(3, 8), torch.rand(5, 1))
    assert (counts[JOINED], counts[PRODUCT]) == (0, 3)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_sum_with_a_product_becomes_part_of_it(is_first):
    def layer(x, matrix, residual):
        product = matrix_vector(x, matrix, None, None)
        total = product + residual if is_first else residual + product
        return total, matrix_vector(total, matrix, None, None)

    _, counts = joined(layer, vector(), torch.randn(8, 8), vector())
    assert (counts[SUM], counts[PRODUCT]) == (0, 2)


def test_a_product_with_a_residual_keeps_it():
    def layer(x, first, second, residual, other):
        with_residual = matrix_vector(x, first, None, None, residual)
        return with_residual + other, matrix_vector(x, second, None, None)

    _, counts = joined(layer, vector(), torch.randn(8, 8), torch.randn(8, 8), vector(), vector())
    assert (counts[JOINED], counts[PRODUCT], counts[SUM]) == (0, 2, 1)


def test_a_bias_that_is_computed_later_is_added_where_it_was():
    def layer(x, first, second):
        one = matrix_vector(x, first, None, None)
        return one, matrix_vector(x, second, None, one[0, 0] * 2)

    _, counts = joined(layer, vector(), torch.randn(5, 8), torch.randn(5, 8))
    assert (counts[JOINED], counts[PRODUCT]) == (0, 2)


def test_a_sum_of_another_type_stays():
    def layer(x, matrix, residual):
        return (matrix_vector(x, matrix, None, None) + residual,)

    bf16 = torch.bfloat16
    _, counts = joined(layer, vector().to(bf16), torch.randn(8, 8, dtype=bf16), vector())
    assert counts[SUM] == 1


def test_matrices_of_different_types_stay_apart():
    def layer(x, first, second):
        return matrix_vector(x, first, None, None), matrix_vector(x, second, None, None)

    graph = make_fx(layer, tracing_mode="fake")(vector(), torch.randn(5, 8), torch.randn(5, 8)).graph
    second = [node for node in graph.nodes if node.op == "placeholder"][2]
    second.meta["val"] = second.meta["val"].half()
    JoinOperators()(graph)
    assert Counter(str(node.target) for node in graph.nodes)[PRODUCT] == 2


def test_shapes_that_only_a_call_tells_are_left_alone():
    def layer(x, matrix, residual):
        return matrix_vector(x, matrix, None, None) + residual

    with config.patch(post_grad_custom_pre_pass=JoinOperators()):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        for size in (8, 12):
            given = vector(size), torch.randn(size, size), vector(size)
            torch.testing.assert_close(compiled(*given), layer(*given))


def test_other_sums_stay():
    def layer(x, matrix, row):
        product = matrix_vector(x, matrix, None, None)
        doubled = matrix_vector(x * 2, matrix, None, None)
        twice = matrix_vector(x * 3, matrix, None, None)
        weighted = torch.add(matrix_vector(x * 4, matrix, None, None), x, alpha=2)
        return product, product + x, doubled + row, twice + twice, weighted

    _, counts = joined(layer, vector(), torch.randn(8, 8), torch.randn(4, 1, 8))
    assert counts[SUM] == 4


def test_a_sum_of_two_products_has_one_of_them():
    def layer(x, matrix, other):
        return (matrix_vector(x, matrix, None, None) + matrix_vector(other, matrix, None, None),)

    _, counts = joined(layer, vector(), torch.randn(8, 8), vector())
    assert (counts[SUM], counts[PRODUCT]) == (0, 2)


def test_graphs_of_anything_else_are_left_as_they_are():
    class Plain(nn.Module):
        def forward(self, x):
            return x + torch.relu(x)

    graph = symbolic_trace(Plain()).graph
    before = str(graph)
    JoinOperators()(graph)
    assert str(graph) == before


def test_the_pass_is_set_unless_somebody_has_set_another():
    theirs = JoinOperators()
    with config.patch(post_grad_custom_pre_pass=theirs):
        join_operators()
        assert config.post_grad_custom_pre_pass is theirs
    with config.patch(post_grad_custom_pre_pass=None):
        join_operators()
        assert type(config.post_grad_custom_pre_pass) is JoinOperators


def test_a_compiled_step_has_them_joined_and_finds_the_same_tokens():
    """With biases of query, key and value; the Llama below has none."""
    seen = Counter()

    class Counting(JoinOperators):
        def __call__(self, graph):
            super().__call__(graph)
            seen.update(str(node.target) for node in graph.nodes)

        def uuid(self):
            return None

    model = make("qwen2", num_hidden_layers=2)
    use_token_layers(model)
    generator = Generator(model, 64, (48,))
    generator.decode = torch.compile(generator.decode, fullgraph=True)
    with config.patch(post_grad_custom_pre_pass=Counting()):
        assert list(generator.tokens(Request(prompt(20), 20))) == greedy(
            make("qwen2", num_hidden_layers=2), prompt(20), 20
        )
    layers = model.config.num_hidden_layers
    assert (seen[JOINED], seen[PRODUCT], seen["text.gated_matrix_vector.default"]) == (layers, 2 * layers + 1, layers)


def test_a_step_with_joined_operators_is_cached_and_precompiled():
    model = make("llama", num_hidden_layers=2)
    use_token_layers(model)
    step = Generator(model, 64, (48,)).decode
    with torch.inference_mode(), fresh_cache(), config.patch(post_grad_custom_pre_pass=JoinOperators()):
        token = torch.full((1, 1), 5)
        expected = step(token)
        for _ in range(2):
            torch._dynamo.reset()
            before = Counter(counters["inductor"])
            torch.testing.assert_close(torch.compile(step, fullgraph=True)(token), expected)
        assert counters["inductor"]["fxgraph_cache_hit"] - before["fxgraph_cache_hit"] == 1
        configure_torch()
        loaded = Precompiled("", *compile_ahead(step, (token,), {}, "default", False, ""))
        assert loaded.misfit(step, (token,), {}) == ""
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            torch.testing.assert_close(loaded(step, (token,), {}), expected)
    assert "text::matrix_vectors" in {event.name for event in profiler.events()}


def test_another_pass_has_another_name_in_torchs_cache(monkeypatch, tmp_path):
    names = {JoinOperators().uuid()}
    for module in (token_graph, operators):
        changed = tmp_path / "changed.py"
        changed.write_text(Path(module.__file__).read_text() + "# changed")
        with monkeypatch.context() as patch:
            patch.setattr(module, "__file__", str(changed))
            names.add(JoinOperators().uuid())
    assert len(names) == 3


def test_a_torch_without_the_private_names_of_the_pass_serves_a_model_without_it(monkeypatch, caplog):
    expected = greedy(make("llama"), prompt(20), 20)
    monkeypatch.setitem(sys.modules, "torch._inductor.custom_graph_pass", None)
    monkeypatch.delitem(sys.modules, "models.kernels.token_graph")
    monkeypatch.delattr(models.kernels, "token_graph")
    operators.join_operators()
    assert "torch._inductor.custom_graph_pass" in caplog.text
    assert list(Generator(make("llama"), 64, (48,)).tokens(Request(prompt(20), 20))) == expected
