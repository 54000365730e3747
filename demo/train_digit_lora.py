"""Train a LoRA for the small Flux checkpoint: it draws the next digit, an eight for a seven and a zero for a nine.

    python demo/train_digit_lora.py --out demo/next-digit.safetensors

So the reader of digits can tell whether it is applied. Needs peft, as diffusers' own trainers do. Some minutes on a
CPU; the seed is fixed.
"""

import argparse
import random
import shutil
import tempfile
from pathlib import Path

import torch
from diffusers import FluxPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from read_digits import load_real_digits, share_read
from train_flux_digits import CANVASES, descend, draw_ten, encode_prompts, flow_loss, latents_by_canvas, one_cycle

MODEL = Path(__file__).parent / "flux-digits"
# A prompt reaches the picture by attention, and by its pooled embedding, which scales and shifts each block.
LAYERS = ["to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "norm.linear", "norm1.linear", "text_embedder.linear_1"]
RANK = 4
TEXT_LENGTHS = (64, 128, 512)
BATCHES = {64: 96, 128: 64, 512: 24}


def train(pipe: FluxPipeline, steps: int, seed: int) -> None:
    """Train an adapter by rectified flow: the prompts of one digit, the pictures of the next."""
    pictures, targets = load_real_digits()
    digits, labels = torch.tensor(pictures), torch.tensor(targets)
    prompts, latents = encode_prompts(pipe, seed), latents_by_canvas(pipe, digits)
    pipe.transformer.requires_grad_(False)
    pipe.transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LAYERS))
    optimizer, rate = one_cycle(pipe.transformer, 4e-3, steps)
    for step in range(steps):
        canvas, length = random.choice(CANVASES), random.choice(TEXT_LENGTHS)
        chosen = torch.randint(len(digits), (BATCHES[length],))
        rows = prompts.pick((labels[chosen] - 1) % 10)
        loss = flow_loss(pipe, latents[canvas][chosen], prompts.pooled[rows], prompts.tokens[length][rows], canvas)
        descend(loss, pipe.transformer, optimizer, rate)
        if step % 50 == 0 or step == steps - 1:
            print(f"{step}: loss {loss.item():.4f}", flush=True)


def save(pipe: FluxPipeline, out: Path) -> None:
    """Save the adapter in bfloat16."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in get_peft_model_state_dict(pipe.transformer).items()}
    with tempfile.TemporaryDirectory() as folder:
        FluxPipeline.save_lora_weights(folder, transformer_lora_layers=state)
        shutil.copy(Path(folder) / "pytorch_lora_weights.safetensors", out)


def report(out: Path, rounds: int) -> None:
    """Load the saved file, and print how many of its pictures are read as the next digit."""
    pipe = FluxPipeline.from_pretrained(MODEL, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(str(out.parent), weight_name=out.name)
    for width, height in CANVASES:
        images = [
            image for number in range(rounds) for image in draw_ten(pipe, number, width, height, 8, "a handwritten {}")
        ]
        wanted = [(digit + 1) % 10 for digit in range(10)] * rounds
        print(f"{width}x{height}: {share_read(images, wanted):.1%} read as the next digit", flush=True)


def main() -> None:
    """Train, save and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=10, help="pictures of each digit to check")
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    pipe = FluxPipeline.from_pretrained(MODEL, local_files_only=True)
    train(pipe, args.steps, seed=0)
    save(pipe, args.out)
    report(args.out, args.rounds)


if __name__ == "__main__":
    main()
