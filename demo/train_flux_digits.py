"""Train a tiny Flux checkpoint that draws handwritten digits.

    python demo/train_flux_digits.py --out demo/flux-digits

writes a folder that plain ``FluxPipeline.from_pretrained`` loads. Everything in
it is the class that FLUX.1 uses, only small: the autoencoder and the transformer
are trained here on scikit-learn's ``load_digits``, the two text encoders are
frozen at their random start, and the tokenizers are built from the word list
below. A few minutes on a GPU; the seed is fixed.
"""

import argparse
import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxPipeline
from flux_digits_model import build_pipeline, prompts_for
from PIL import Image
from read_digits import DIGIT_SHARE, DIGIT_WORDS, FULL_INK, GRID, load_real_digits, share_read
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

CANVASES = ((64, 64), (96, 64), (64, 96))  # width, height
TEXT_LENGTHS = (512, 512, 256, 128, 64, 64)  # picked at random; 512 is the pipeline's default
TEXT_TOKENS = 2**15  # the most text tokens in a training batch: long texts get smaller batches
DROP_PROMPT = 0.1  # share of training pictures with an empty prompt, for guidance


@dataclass(frozen=True)
class Settings:
    """The differences between a full training and a quick trial."""

    vae_steps: int = 800
    flow_steps: int = 6000
    batch: int = 256
    device: str = "cuda"
    seed: int = 0


# Pictures


def draw_real(digits: Tensor, width: int, height: int) -> Tensor:
    """Draw real digits (N, 8, 8), ink 0..16, as dark ink on a white canvas (N, 3, H, W) in -1..1."""
    cell = round(DIGIT_SHARE * min(width, height) / GRID)
    ink = functional.pad(digits[:, None] / FULL_INK, (1, 1, 1, 1))
    ink = functional.interpolate(ink, scale_factor=cell, mode="bicubic").clamp(0, 1)
    side, over = (width - ink.shape[-1]) // 2, (height - ink.shape[-2]) // 2
    return 1 - 2 * functional.pad(ink, (side, side, over, over)).expand(-1, 3, -1, -1)


def to_images(pictures: Tensor) -> list[Image.Image]:
    """Turn pictures (N, 3, H, W) in -1..1 into images."""
    pixels = (127.5 * (pictures + 1)).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(picture) for picture in pixels]


# Training


def one_cycle(model: torch.nn.Module, peak: float, steps: int) -> tuple[torch.optim.Optimizer, OneCycleLR]:
    """Return an optimizer and a rate that warms up to its peak and falls to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.99), weight_decay=0.01)
    return optimizer, OneCycleLR(optimizer, max_lr=peak, total_steps=steps, pct_start=0.05)


def descend(loss: Tensor, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rate: OneCycleLR) -> None:
    """Take one clipped step down the loss."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    rate.step()


def train_vae(vae: AutoencoderKL, digits: Tensor, settings: Settings) -> None:
    """Train the autoencoder on the real digits (N, 8, 8), then set its latents' scale and shift."""
    optimizer, rate = one_cycle(vae, 2e-3, settings.vae_steps)
    for step in range(settings.vae_steps):
        width, height = random.choice(CANVASES)
        chosen = torch.randint(len(digits), (settings.batch // 4,), device=digits.device)
        pictures = draw_real(digits[chosen], width, height)
        latents = vae.encode(pictures).latent_dist
        drawn = vae.decode(latents.sample()).sample
        error = functional.l1_loss(drawn, pictures) + functional.mse_loss(drawn, pictures)
        spread = latents.kl().mean() / latents.mean[0].numel()
        descend(error + 1e-3 * spread, vae, optimizer, rate)
        if step % 500 == 0 or step == settings.vae_steps - 1:
            print(f"vae {step}: error {error.item():.4f}, kl {spread.item():.2f}", flush=True)
    latents = encode(vae, draw_real(digits, *CANVASES[0]))
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())


@torch.no_grad()
def encode(vae: AutoencoderKL, pictures: Tensor) -> Tensor:
    """Encode pictures (N, 3, H, W) to the means of their raw latents (N, 4, H/8, W/8)."""
    return torch.cat([vae.encode(part).latent_dist.mean for part in pictures.split(256)])


def pack(latents: Tensor) -> Tensor:
    """Pack latents (N, 4, h, w) like the pipeline: (N, h/2 * w/2, 16)."""
    return FluxPipeline._pack_latents(latents, *latents.shape)


@dataclass(frozen=True)
class Prompts:
    """The encoded training prompts: P for each of the ten digits, then the empty prompt."""

    per_digit: int
    pooled: Tensor  # (10 * P + 1, 64)
    tokens: dict[int, Tensor]  # for each text length L: (10 * P + 1, L, 64)

    def pick(self, labels: Tensor) -> Tensor:
        """Pick a prompt's row for each label (N,); some pictures get the empty prompt."""
        rows = labels * self.per_digit + torch.randint_like(labels, self.per_digit)
        return torch.where(torch.rand(len(labels), device=labels.device) < DROP_PROMPT, len(self.pooled) - 1, rows)


@torch.no_grad()
def encode_prompts(pipe: FluxPipeline, seed: int) -> Prompts:
    """Encode all training prompts with the pipeline's own method, padded to each text length."""
    rng = random.Random(seed)
    by_digit = [prompts_for(digit, rng) for digit in range(10)]
    tokens = {}
    for length in sorted(set(TEXT_LENGTHS)):
        parts = [pipe.encode_prompt(part, max_sequence_length=length) for part in [*by_digit, [""]]]
        tokens[length] = torch.cat([part[0] for part in parts])
    return Prompts(len(by_digit[0]), torch.cat([part[1] for part in parts]), tokens)


def latents_by_canvas(pipe: FluxPipeline, digits: Tensor) -> dict[tuple[int, int], Tensor]:
    """Return the digits' latents (N, h/2 * w/2, 16) for each canvas, scaled like the pipeline's."""
    config = pipe.vae.config
    return {
        canvas: pack((encode(pipe.vae, draw_real(digits, *canvas)) - config.shift_factor) * config.scaling_factor)
        for canvas in CANVASES
    }


def flow_loss(pipe: FluxPipeline, clean: Tensor, pooled: Tensor, tokens: Tensor, canvas: tuple[int, int]) -> Tensor:
    """Rectified flow: at clean + sigma * (noise - clean), predict noise - clean.

    ``clean`` is (N, S, 16) for the canvas's S latent patches, ``pooled`` (N, 64), ``tokens`` (N, L, 64).
    """
    device = clean.device
    noise = torch.randn_like(clean)
    even = torch.randperm(len(clean), device=device) + torch.rand(len(clean), device=device)
    sigma = even / len(clean)  # (N,), spread evenly over 0..1
    flow = pipe.transformer(
        hidden_states=torch.lerp(clean, noise, sigma[:, None, None]),
        timestep=sigma,
        pooled_projections=pooled,
        encoder_hidden_states=tokens,
        txt_ids=torch.zeros(tokens.shape[1], 3, device=device),
        img_ids=pipe._prepare_latent_image_ids(None, canvas[1] // 16, canvas[0] // 16, device, clean.dtype),
        return_dict=False,
    )[0]
    return functional.mse_loss(flow, noise - clean)


def train_flow(pipe: FluxPipeline, digits: Tensor, labels: Tensor, settings: Settings) -> None:
    """Train the transformer on the digits (N, 8, 8) and labels (N,); keep its running average."""
    prompts, latents = encode_prompts(pipe, settings.seed), latents_by_canvas(pipe, digits)
    model = pipe.transformer
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.998))
    optimizer, rate = one_cycle(model, 1.5e-3, settings.flow_steps)
    for step in range(settings.flow_steps):
        canvas, length = random.choice(CANVASES), random.choice(TEXT_LENGTHS)
        batch = min(settings.batch, TEXT_TOKENS // length)
        chosen = torch.randint(len(digits), (batch,), device=digits.device)
        rows = prompts.pick(labels[chosen])
        loss = flow_loss(pipe, latents[canvas][chosen], prompts.pooled[rows], prompts.tokens[length][rows], canvas)
        descend(loss, model, optimizer, rate)
        average.update_parameters(model)
        if step % 500 == 0 or step == settings.flow_steps - 1:
            print(f"flow {step}: loss {loss.item():.4f}", flush=True)
    model.load_state_dict(average.module.state_dict())


# Checking and saving


def draw_ten(pipe: FluxPipeline, seed: int, width: int, height: int, steps: int, template: str) -> list[Image.Image]:
    """Draw each digit once, zero to nine, with fixed seeds."""
    return pipe(
        [template.format(word) for word in DIGIT_WORDS],
        width=width,
        height=height,
        num_inference_steps=steps,
        generator=[torch.Generator().manual_seed(10 * seed + digit) for digit in range(10)],
    ).images


def check(pipe: FluxPipeline, rounds: int, width: int, height: int, steps: int, template: str) -> float:
    """Draw each digit ``rounds`` times. Return the share that is read as the requested digit."""
    images = [draw_ten(pipe, seed, width, height, steps, template) for seed in range(rounds)]
    return share_read(list(itertools.chain.from_iterable(images)), list(range(10)) * rounds)


def report(folder: Path, device: str, dtype: torch.dtype, rounds: int) -> None:
    """Load the saved folder and print how many of its pictures are read right."""
    torch.set_float32_matmul_precision("highest")
    pipe = FluxPipeline.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device)
    pipe.set_progress_bar_config(disable=True)
    cases = [(*canvas, steps, "a handwritten {}") for canvas in CANVASES for steps in (8, 4)]
    cases.append((*CANVASES[0], 8, "an ugly {} scribbled on my napkin"))
    for width, height, steps, template in cases:
        share = check(pipe, rounds, width, height, steps, template)
        print(f"{dtype}, {width}x{height}, {steps} steps, '{template}': {share:.1%}", flush=True)


def save(pipe: FluxPipeline, folder: Path) -> None:
    """Save the pipeline, with the two trained models in bfloat16, which halves the folder.

    The text encoders stay in float32. Loaded without a ``dtype``, they keep the type
    on disk, but the other two models load as float32.
    """
    for model in (pipe.vae, pipe.transformer):
        for weight in model.parameters():
            weight.data = weight.data.to(torch.bfloat16)
    pipe.to("cpu").save_pretrained(folder)


def train(settings: Settings) -> FluxPipeline:
    """Train the autoencoder and then the transformer, from the fixed seed."""
    torch.set_float32_matmul_precision("high")
    random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    pipe = build_pipeline().to(settings.device)
    pictures, targets = load_real_digits()
    digits = torch.tensor(pictures, device=settings.device)
    labels = torch.tensor(targets, device=settings.device)
    train_vae(pipe.vae, digits, settings)
    rebuilt = pipe.vae(draw_real(digits, *CANVASES[0])[:500]).sample.detach()
    print(f"real digits read right: {share_read(to_images(draw_real(digits, *CANVASES[0])), targets):.1%}")
    print(f"rebuilt ones read right: {share_read(to_images(rebuilt.clamp(-1, 1)), targets[:500]):.1%}")
    train_flow(pipe, digits, labels, settings)
    return pipe


def main() -> None:
    """Train, save and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vae-steps", type=int, default=Settings.vae_steps)
    parser.add_argument("--flow-steps", type=int, default=Settings.flow_steps)
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--rounds", type=int, default=20, help="pictures of each digit to check")
    args = parser.parse_args()
    settings = Settings(args.vae_steps, args.flow_steps, args.batch, args.device)
    save(train(settings), args.out)
    for dtype in (torch.float32, torch.bfloat16):
        report(args.out, args.device, dtype, args.rounds)


if __name__ == "__main__":
    main()
