"""Products of matrices with one vector, which are most of what a token costs: operators, and layers that use them.

A token reads every weight once and does little with it, so what counts is how many bytes are on their way at any time.
On a GPU they are Triton kernels whose programs fetch their first weights while the kernel before is still at work
(programmatic dependent launch, CUDA C++ Programming Guide), where the GPU can.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812, as everybody calls it
from torch import nn
from transformers.activations import SiLUActivation


class Block(NamedTuple):
    """What a program multiplies at once of a matrix: so many elements, of so many columns or fewer."""

    elements: int
    most_columns: int


# Found by benchmarks/matrix_vector.py: of numbers of 16 bits or more, of 8 bits, and of each of two matrices.
BLOCK = Block(4096, 2048)
BLOCK_OF_8_BITS = Block(2048, 1024)
GATED_BLOCK = Block(4096, 1024)
_WARPS = 4
# Hopper: the first generation whose kernels can begin before the one before them has ended.
_OVERLAPPING_CAPABILITY = (9, 0)


@torch.library.custom_op("text::matrix_vector", mutates_args=())
def matrix_vector(
    vector: torch.Tensor, matrix: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """`matrix @ vector`, times `scale`, plus `bias`; sums are of float32.

    vector: [1, 1, columns], matrix: [rows, columns], contiguous, scale: [rows, 1], bias: [rows]; result: [1, 1, rows],
    of the vector's type. With `scale`, the matrix may be of int8 or float8.
    """
    if vector.is_cuda:
        block = BLOCK_OF_8_BITS if matrix.itemsize == 1 else BLOCK
        return multiply_on_gpu(vector, matrix, None, scale, bias, block)
    if scale is None:
        return F.linear(vector, matrix, bias)
    result = F.linear(vector.float(), matrix.float()) * scale[:, 0]
    return (result if bias is None else result + bias).to(vector.dtype)


@matrix_vector.register_fake
def _(
    vector: torch.Tensor, matrix: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    return vector.new_empty((1, 1, matrix.shape[0]))


@torch.library.custom_op("text::gated_matrix_vector", mutates_args=())
def gated_matrix_vector(vector: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate @ vector) * (up @ vector)`; sums are of float32, and rounded as those of single operators are.

    vector: [1, 1, columns], gate and up: [rows, columns], contiguous; result: [1, 1, rows].
    """
    if vector.is_cuda:
        return multiply_on_gpu(vector, gate, up, None, None, GATED_BLOCK)
    return F.silu(F.linear(vector, gate)) * F.linear(vector, up)


@gated_matrix_vector.register_fake
def _(vector: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return vector.new_empty((1, 1, gate.shape[0]))


def multiply_on_gpu(
    vector: torch.Tensor,
    matrix: torch.Tensor,
    up: torch.Tensor | None,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    block: Block,
) -> torch.Tensor:
    """The kernel of both operators: the one with `up`, and the other without."""
    rows, columns = matrix.shape
    block_columns = min(block.most_columns, power_of_2(columns))
    block_rows = block.elements // block_columns
    result = vector.new_empty((1, 1, rows))
    overlaps = can_overlap(vector.device)
    _kernel()[(-(-rows // block_rows),)](
        vector.contiguous(),
        matrix,
        up,
        scale,
        bias,
        result,
        rows,
        COLUMNS=columns,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        OVERLAPS=overlaps,
        num_warps=_WARPS,
        **launch_options(overlaps),
    )
    return result


@cache
def _kernel() -> Any:
    """The Triton kernel: `models/decode_kernels.py` imports Triton, which a CPU does without."""
    from models.decode_kernels import multiply

    return multiply


def power_of_2(number: int) -> int:
    """The least that is not smaller."""
    return 1 << (number - 1).bit_length()


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel's programs can begin while those of the kernel before are still at work."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _OVERLAPPING_CAPABILITY


def launch_options(overlaps: bool) -> dict[str, bool]:
    """Of a Triton kernel; the option is not known to all of Triton's backends."""
    return {"launch_pdl": True} if overlaps else {}


class TokenLinear(nn.Linear):
    """A linear layer that multiplies one token by `matrix_vector`, and more of them as every other does."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs of any shape but for the last dimension."""
        if inputs.numel() == self.in_features and inputs.dim() == 3:
            return matrix_vector(inputs, self.weight, None, self.bias)
        return F.linear(inputs, self.weight, self.bias)


class GatedMLP(nn.Module):
    """The feed-forward part of Llama and of more than a hundred models after it, in two products for one token."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            mlp.act_fn,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and result: [1, tokens, size]."""
        if x.numel() == self.gate_proj.in_features and x.dim() == 3:
            gated = gated_matrix_vector(x, self.gate_proj.weight, self.up_proj.weight)
        else:
            gated = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        result: torch.Tensor = self.down_proj(gated)
        return result


_GATED = ast.dump(
    ast.parse("down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\nreturn down_proj")
)


@cache
def _computes_gated(kind: type[nn.Module]) -> bool:
    """Whether a class does what `GatedMLP` does, by its source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or function.decorator_list or hasattr(kind.forward, "__wrapped__"):
        return False
    return [one.arg for one in function.args.args] == ["self", "x"] and ast.dump(
        ast.Module(function.body, [])
    ) == _GATED


def _is_as_its_class(module: nn.Module) -> bool:
    """Whether a module does what its class does: nobody has hooked it, or given it a `forward` of its own."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" not in vars(module) and not any(vars(module)[name] for name in hooks)


def _is_plain(module: Any) -> bool:
    return type(module) is nn.Linear and module.weight.is_contiguous() and _is_as_its_class(module)


def _is_gated(module: Any) -> bool:
    if (
        not _is_as_its_class(module)
        or not _computes_gated(type(module))
        or type(module.act_fn) not in (nn.SiLU, SiLUActivation)
    ):
        return False
    layers = (module.gate_proj, module.up_proj)
    return _is_as_its_class(module.act_fn) and all(
        type(layer) is TokenLinear and layer.bias is None for layer in layers
    )


def use_matrix_vector(model: nn.Module) -> None:
    """Replace the plain linear layers in `model`, and what is made of them, which keep their weights."""
    _replace(model, _is_plain, TokenLinear)
    _replace(model, _is_gated, GatedMLP)


def _replace(model: nn.Module, is_meant: Callable[[Any], bool], make: Callable[[Any], nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if is_meant(child):
                setattr(parent, name, make(child))
