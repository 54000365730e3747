"""What of a token's graph is joined."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from random_texts import greedy, make, prompt
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from compile_cache.inductor.function import Precompiled, compile_ahead
from compile_cache.inductor.toolchain import configure_torch
from models.kernels import graph_pass, operators
from models.kernels.graph_pass import JoinOperators, join_operators
from models.kernels.operators import matrix_vector
from models.text.generation import Generator, Request
from models.text.layers import use_token_layers

JOINED = "text.matrix_vectors.default"
PRODUCT = "text.matrix_vector.default"
SUM = "aten.add.Tensor"


def product(x, matrix, scale=None, bias=None, residual=None):
    return matrix_vector(x, matrix, scale, bias, residual)


def vector(size: int = 8) -> torch.Tensor:
    return torch.randn(1, 1, size)


def chain(x, first, second, third, fourth, other):
    plain = [product(x, one) for one in (first, second, third, fourth)]
    return (*plain, product(plain[0], other))


def later_bias(x, first, second):
    one = product(x, first)
    return one, product(x, second, bias=one[0, 0] * 2)


def other_sums(x, matrix, row):
    twice = product(x * 3, matrix)
    alone = product(x, matrix)
    weighted = torch.add(product(x * 4, matrix), x, alpha=2)
    return alone, alone + x, product(x * 2, matrix) + row, twice + twice, weighted


M = torch.randn(8, 8)
# A layer, its inputs, and how many joined products, products and sums it has after the pass.
LAYERS = {
    "products of one vector become one, at most three": (
        chain,
        [vector(), *(torch.randn(rows, 8) for rows in (5, 3, 4, 2)), torch.randn(6, 5)],
        (1, 2, 0),
    ),
    "their biases are added to them": (
        lambda x, first, second, bias: (product(x, first, bias=bias), product(x, second)),
        [vector(), torch.randn(5, 8), torch.randn(3, 8), torch.randn(5)],
        (1, 0, 1),
    ),
    "scaled and computed matrices stay alone": (
        lambda x, first, second, scale: (product(x, first, scale), product(x, second), product(x, second * 2)),
        [vector(), torch.randint(-9, 9, (5, 8), dtype=torch.int8), torch.randn(3, 8), torch.rand(5, 1)],
        (0, 3, 0),
    ),
    "a sum with a product is part of it": (lambda x, m, y: (product(x, m) + y,), [vector(), M, vector()], (0, 1, 0)),
    "from the right too": (lambda x, m, y: (y + product(x, m),), [vector(), M, vector()], (0, 1, 0)),
    "a product with a residual keeps it": (
        lambda x, first, second, y, z: (product(x, first, residual=y) + z, product(x, second)),
        [vector(), M, torch.randn(8, 8), vector(), vector()],
        (0, 2, 1),
    ),
    "a bias that is computed later is added where it was": (later_bias, [vector(), M, torch.randn(8, 8)], (0, 2, None)),
    "a sum of another type stays": (
        lambda x, m, y: (product(x, m) + y,),
        [vector().bfloat16(), M.bfloat16(), vector()],
        (0, 1, 1),
    ),
    "other sums stay": (other_sums, [vector(), M, torch.randn(4, 1, 8)], (0, 4, 4)),
    "a sum of two products has one of them": (
        lambda x, m, y: (product(x, m) + product(y, m),),
        [vector(), M, vector()],
        (0, 2, 0),
    ),
}


@pytest.mark.parametrize(("layer", "inputs", "expected"), LAYERS.values(), ids=LAYERS)
def test_what_of_a_layer_is_joined(layer, inputs, expected):
    traced = make_fx(layer, tracing_mode="fake")(*inputs)
    JoinOperators()(traced.graph)
    traced.graph.lint()
    traced.recompile()
    for found, wanted in zip(traced(*inputs), layer(*inputs), strict=True):
        torch.testing.assert_close(found, wanted)
    counts = Counter(str(node.target) for node in traced.graph.nodes)
    for operator, number in zip((JOINED, PRODUCT, SUM), expected, strict=True):
        assert number in (None, counts[operator]), operator


def test_matrices_of_different_types_stay_apart():
    inputs = vector(), torch.randn(5, 8), torch.randn(5, 8)
    graph = make_fx(lambda x, *both: [product(x, one) for one in both], tracing_mode="fake")(*inputs).graph
    second = [node for node in graph.nodes if node.op == "placeholder"][2]
    second.meta["val"] = second.meta["val"].half()
    JoinOperators()(graph)
    assert Counter(str(node.target) for node in graph.nodes)[PRODUCT] == 2


def test_shapes_that_only_a_call_tells_are_left_alone():
    def layer(x, matrix, residual):
        return product(x, matrix) + residual

    with config.patch(post_grad_custom_pre_pass=JoinOperators()):
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        for size in (8, 12):
            given = vector(size), torch.randn(size, size), vector(size)
            torch.testing.assert_close(compiled(*given), layer(*given))


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

    model = make("qwen2", num_hidden_layers=1)
    use_token_layers(model)
    generator = Generator(model, 64, (48,))
    generator.decode = torch.compile(generator.decode, fullgraph=True)
    expected = greedy(make("qwen2", num_hidden_layers=1), prompt(20), 20)
    with config.patch(post_grad_custom_pre_pass=Counting()):
        assert list(generator.tokens(Request(prompt(20), 20))) == expected
    layers = model.config.num_hidden_layers
    assert (seen[JOINED], seen[PRODUCT], seen["text.gated_matrix_vector.default"]) == (layers, 2 * layers + 1, layers)


def test_a_step_with_joined_operators_is_cached_and_precompiled():
    model = make("llama", num_hidden_layers=1)
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
        loaded = Precompiled("", *compile_ahead((step, (token,), {}), "default", False, ""))
        assert loaded.misfit((step, (token,), {})) == ""
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            torch.testing.assert_close(loaded(step, (token,), {}), expected)
    assert "text::matrix_vectors" in {event.name for event in profiler.events()}


def test_another_pass_has_another_name_in_torchs_cache(monkeypatch, tmp_path):
    names = {JoinOperators().uuid()}
    for module in (graph_pass, operators):
        changed = tmp_path / "changed.py"
        changed.write_text(Path(module.__file__).read_text() + "# changed")
        with monkeypatch.context() as patch:
            patch.setattr(module, "__file__", str(changed))
            names.add(JoinOperators().uuid())
    assert len(names) == 3
