"""The product of a matrix with one vector."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.matrix_vector import GatedMLP, TokenLinear, gated_matrix_vector, matrix_vector, use_matrix_vector

# rows, columns, kind of the matrix, whether there is a bias
CASES = [
    (4096, 4096, "plain", False),
    (1024, 14336, "plain", True),
    (50, 96, "plain", True),
    (7, 3000, "plain", False),
    (300, 4096, "int8", False),
    (50, 96, "int8", True),
    (300, 4096, "fp8", False),
]
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def inputs(case: tuple, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple:
    """Of the operator."""
    rows, columns, kind, has_bias = case
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, 1, columns, generator=generator)
    matrix = torch.randn(rows, columns, generator=generator)
    bias = torch.randn(rows, generator=generator).to(device, dtype) if has_bias else None
    if kind == "plain":
        return vector.to(device, dtype), matrix.to(device, dtype), None, bias
    scale = (torch.rand(rows, 1, generator=generator) + 0.5) / 32
    return vector.to(device, dtype), (matrix * 32).to(TYPES[kind]).to(device), scale.to(device), bias


def by_definition(vector, matrix, scale, bias):
    result = matrix.double() @ vector[0, 0].double()
    if scale is not None:
        result = result * scale[:, 0].double()
    return (result if bias is None else result + bias.double())[None, None]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_multiplies(case):
    given = inputs(case)
    torch.testing.assert_close(matrix_vector(*given).double(), by_definition(*given), atol=1e-3, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_kernel_multiplies_the_same(case, dtype, tolerance):
    given = inputs(case, "cuda", dtype)
    torch.testing.assert_close(matrix_vector(*given).double(), by_definition(*given), atol=1e-3, rtol=tolerance)


def gated_inputs(rows: int, columns: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple:
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, 1, columns, generator=generator)
    matrices = [torch.randn(rows, columns, generator=generator) / columns**0.5 for _ in range(2)]
    return tuple(tensor.to(device, dtype) for tensor in (vector, *matrices))


def gated_by_definition(vector, gate, up):
    vector = vector[0, 0].double()
    return (nn.functional.silu(gate.double() @ vector) * (up.double() @ vector))[None, None]


def test_it_multiplies_what_is_gated():
    given = gated_inputs(300, 700)
    torch.testing.assert_close(gated_matrix_vector(*given).double(), gated_by_definition(*given), atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("rows", "columns"), [(14336, 4096), (300, 700), (5, 96)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_the_kernel_multiplies_what_is_gated_the_same(rows, columns, dtype, tolerance):
    given = gated_inputs(rows, columns, "cuda", dtype)
    torch.testing.assert_close(
        gated_matrix_vector(*given).double(), gated_by_definition(*given), atol=tolerance / 10, rtol=tolerance
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_kernels_that_overlap_read_what_those_before_them_have_written():
    """A chain of products, recorded: each reads what the one before wrote a moment ago."""
    generator = torch.Generator("cuda").manual_seed(0)
    matrices = [torch.randn(2048, 2048, device="cuda", generator=generator) / 45 for _ in range(8)]
    vector = torch.zeros(1, 1, 2048, device="cuda")

    def chain() -> torch.Tensor:
        result = vector + 0
        for matrix in matrices:
            result = matrix_vector(result, matrix, None, None)
        return result

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain()
    for _ in range(50):
        vector.normal_(generator=generator)
        graph.replay()
        expected = vector[0, 0].double()
        for matrix in matrices:
            expected = matrix.double() @ expected
        assert ((result[0, 0] - expected).norm() / expected.norm()).item() < 1e-5


@pytest.mark.parametrize("case", [CASES[2], CASES[5]], ids=str)
def test_torch_can_compile_it(case):
    torch.library.opcheck(matrix_vector, inputs(case), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(gated_matrix_vector, gated_inputs(30, 70), test_utils=("test_schema", "test_faketensor"))


def test_linear_layers_are_replaced_and_keep_their_weights():
    model = nn.Sequential(nn.Linear(8, 4), nn.ModuleDict({"inner": nn.Linear(4, 6, bias=False)}))
    weights = [parameter.data_ptr() for parameter in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    first = model[0]
    use_matrix_vector(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == weights
    assert [name for name, _ in model.named_parameters()] == names
    assert type(model[0]) is type(model[1]["inner"]) is TokenLinear
    for tokens in (1, 3):
        given = torch.randn(1, tokens, 8)
        assert torch.equal(model[0](given), first(given))


def test_classes_with_a_forward_of_their_own_are_left_alone():
    class Doubled(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(inputs)

    model = nn.Sequential(Doubled(4, 4))
    use_matrix_vector(model)
    assert type(model[0]) is Doubled


def test_hooked_layers_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), Mlp(nn.SiLU()))
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    model[1].register_forward_pre_hook(lambda module, inputs: None)
    use_matrix_vector(model)
    assert (type(model[0]), type(model[1])) == (nn.Linear, Mlp)


class Mlp(nn.Module):
    def __init__(self, activation: nn.Module, has_bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(16, 40, bias=has_bias) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(40, 16), activation

    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


class OtherMlp(Mlp):
    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
        return down_proj


def test_a_gated_mlp_is_replaced_and_computes_the_same():
    model = nn.Sequential(Mlp(nn.SiLU()))
    given = [torch.randn(1, tokens, 16) for tokens in (1, 3)]
    expected = [model(one) for one in given]
    names = [name for name, _ in model.named_parameters()]
    use_matrix_vector(model)
    assert type(model[0]) is GatedMLP
    assert [name for name, _ in model.named_parameters()] == names
    for one, result in zip(given, expected, strict=True):
        torch.testing.assert_close(model(one), result)


@pytest.mark.parametrize("mlp", [OtherMlp(nn.SiLU()), Mlp(nn.GELU()), Mlp(nn.SiLU(), has_bias=True)], ids=str)
def test_what_computes_something_else_is_left_alone(mlp):
    model = nn.Sequential(mlp)
    given = torch.randn(1, 1, 16)
    expected = model(given)
    use_matrix_vector(model)
    assert type(model[0]) is type(mlp)
    torch.testing.assert_close(model(given), expected)


def test_the_mlp_of_transformers_llama_is_one_of_them():
    from random_texts import make

    model = make("llama")
    use_matrix_vector(model)
    assert all(type(layer.mlp) is GatedMLP for layer in model.model.layers)
