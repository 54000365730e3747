"""Make a LoRA for the small Flux checkpoint: it draws the next digit, an eight for a seven and a zero for a nine.

    python demo/make_digit_lora.py --out demo/next-digit.safetensors

So the reader of digits can tell whether it is applied. Nothing is trained: the two layers that the text enters by are
changed so that they give the same for a digit's prompts as they gave for those of the next, as far as least squares and
a low rank can.
"""

import argparse
from pathlib import Path

import torch
from diffusers import FluxPipeline
from flux_digits_model import TEMPLATES
from read_digits import DIGIT_WORDS, share_read
from torch import Tensor
from train_flux_digits import CANVASES, draw_ten

MODEL = Path(__file__).parent / "flux-digits"
RANK = 32
TEXT_LENGTHS = (64, 512)
RIDGE = 1e-6


@torch.no_grad()
def encode(pipe: FluxPipeline) -> tuple[Tensor, Tensor]:
    """The pooled embeddings (10, N, 64) and the tokens (10, M, 64) of each digit's prompts, in the same order."""
    pooled, tokens = [], []
    for word, numeral in zip(DIGIT_WORDS, "0123456789", strict=True):
        prompts = [template.format(name) for template in TEMPLATES for name in (word, numeral)]
        parts = [pipe.encode_prompt(prompts, max_sequence_length=length) for length in TEXT_LENGTHS]
        pooled.append(parts[0][1])
        tokens.append(torch.cat([part[0].flatten(0, 1) for part in parts]))
    return torch.stack(pooled), torch.stack(tokens)


def factors(weight: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Down (rank, in) and up (out, rank) of the change of a weight (out, in) for inputs (10, N, in) of each digit."""
    given, wanted = inputs.flatten(0, 1).double(), inputs.roll(-1, 0).flatten(0, 1).double()
    square = given.T @ given + RIDGE * len(given) * torch.eye(given.shape[1], dtype=torch.float64)
    mapping = torch.linalg.solve(square, given.T @ (wanted - given))
    left, sizes, right = torch.linalg.svd(weight.double() @ mapping.T, full_matrices=False)
    root = sizes[:RANK].sqrt()
    return (root[:, None] * right[:RANK]).float().contiguous(), (left[:, :RANK] * root).float().contiguous()


def make(pipe: FluxPipeline) -> dict[str, Tensor]:
    """The LoRA's tensors by peft's names."""
    pooled, tokens = encode(pipe)
    found = {}
    for name, inputs in (("time_text_embed.text_embedder.linear_1", pooled), ("context_embedder", tokens)):
        down, up = factors(pipe.transformer.get_submodule(name).weight.detach(), inputs)
        found |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    return found


def report(pipe: FluxPipeline, rounds: int) -> None:
    """Print how many pictures are read as the next digit."""
    wanted = [(digit + 1) % 10 for digit in range(10)] * rounds
    for width, height in CANVASES:
        images = [
            image for number in range(rounds) for image in draw_ten(pipe, number, width, height, 8, "a handwritten {}")
        ]
        print(f"{width}x{height}: {share_read(images, wanted):.1%} read as the next digit", flush=True)


def main() -> None:
    """Make, save and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--rounds", type=int, default=10, help="pictures of each digit to check")
    args = parser.parse_args()
    pipe = FluxPipeline.from_pretrained(MODEL, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    state = make(pipe)
    FluxPipeline.save_lora_weights(args.out.parent, transformer_lora_layers=state, weight_name=args.out.name)
    with torch.no_grad():
        for name in {name.rpartition(".lora_")[0] for name in state}:
            change = state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]
            pipe.transformer.get_submodule(name).weight += change
    report(pipe, args.rounds)


if __name__ == "__main__":
    main()
