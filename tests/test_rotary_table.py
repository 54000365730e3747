"""Rotary embeddings that are looked up."""

from __future__ import annotations

import pytest
import torch
from random_texts import FAMILIES, make
from torch import nn

from models.text.layers import RotaryTable, use_rotary_tables

TOKENS = 50


class Wrapped(nn.Module):
    """A rotary embedding where a model has it."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary_emb = rotary
        self.weight = nn.Parameter(torch.zeros(1))


def tables(model: nn.Module) -> list[RotaryTable]:
    return [module for module in model.modules() if isinstance(module, RotaryTable)]


@pytest.mark.parametrize("family", sorted({*FAMILIES, "olmo2", "ernie4_5"} - {"gemma3_text"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_gives_what_the_embedding_gives(family, dtype):
    """The last two round to no type of their input."""
    model = make(family)
    rotary = model.model.rotary_emb
    use_rotary_tables(model, TOKENS)
    assert len(tables(model)) == 1
    x = torch.zeros(1, 1, dtype=dtype)
    for positions in (torch.arange(TOKENS)[None], torch.tensor([[7]])):
        expected, found = rotary(x, positions), model.model.rotary_emb(x, positions)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=0, rtol=0)  # and of the same type


def test_a_second_table_replaces_the_first():
    model = make("llama")
    rotary = model.model.rotary_emb
    for tokens in (10, TOKENS):
        use_rotary_tables(model, tokens)
        assert [len(table.cos) for table in tables(model)] == [tokens]
        assert model.model.rotary_emb.rotary is rotary


def test_what_a_model_reads_of_its_embedding_is_there():
    model = make("llama")
    rotary = model.model.rotary_emb
    use_rotary_tables(model, TOKENS)
    found = model.model.rotary_emb
    assert found.config is rotary.config
    assert (found.rope_type, found.attention_scaling) == (rotary.rope_type, rotary.attention_scaling)


def test_one_that_somebody_has_hooked_stays():
    model = make("llama")
    model.model.rotary_emb.register_forward_hook(lambda module, inputs, output: output)
    use_rotary_tables(model, TOKENS)
    assert not tables(model)


def test_one_that_asks_for_the_kind_of_layer_stays():
    model = make("gemma3_text")
    use_rotary_tables(model, TOKENS)
    assert not tables(model)


class Several(nn.Module):
    """Positions in three dimensions, as models of pictures and text have them."""

    rope_type = "default"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.rand(4))

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Complex(Several):
    """One result, as Llama 4 has it."""

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq
        return torch.polar(torch.ones_like(angles), angles)


def test_positions_of_other_dimensions_are_computed():
    model = Wrapped(Several())
    rotary = model.rotary_emb
    use_rotary_tables(model, TOKENS)
    positions = torch.arange(5).expand(3, 1, 5)
    expected, found = rotary(torch.zeros(1), positions), model.rotary_emb(torch.zeros(1), positions)
    assert len(tables(model)) == 1
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_one_that_gives_something_else_stays():
    model = Wrapped(Complex())
    use_rotary_tables(model, TOKENS)
    assert not tables(model)
