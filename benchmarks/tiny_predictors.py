"""Public Cog predictors, and folders with tiny random weights that they load. real_predictors.py serves them.

A predictor is named by its repository and commit: none of its source is here. `replace` is what a machine without a GPU
and without the real weights asks for. It is no part of an adoption.
"""

from __future__ import annotations

import base64
import io
import sys
import wave
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLHunyuanVideo,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxControlNetModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    PNDMScheduler,
    StableDiffusionLatentUpscalePipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from diffusers.utils import convert_state_dict_to_diffusers
from llama import build_tokenizer
from PIL import Image
from pipelines import SHAPES, Shape, build_flux, build_pipeline, clip_config
from tokenizers import pre_tokenizers
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTextModel,
    CLIPTokenizer,
    GemmaConfig,
    GemmaForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PhiConfig,
    PhiForCausalLM,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipProcessor,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

TOKENIZERS = Path(__file__).resolve().parents[1] / "demo/flux-digits"
_SEED = 0
_WORDS = 1000
_CPU = {'"cuda"': '"cpu"', "'cuda'": "'cpu'", "torch.float16": "torch.float32", 'variant="fp16",': ""}
# The widths of every tiny transformer.
_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_VISION: dict[str, Any] = {**_SMALL, "image_size": 32, "patch_size": 8}


@dataclass(frozen=True, slots=True)
class Public:
    """A public predictor.

    `build` writes its weights into the folder in which it is served. `on_cpu` and `replace` change its files, `stubs`
    are modules of benchmarks/stubs. `requests` are the inputs of its predictions. `tolerance` is the largest
    ‖found − untouched‖ / ‖untouched‖ of an answer's numbers: pixels, or text that is one.
    """

    kind: str
    repository: str
    commit: str
    build: Callable[[Path], None]
    requests: tuple[dict[str, Any], ...]
    folder: str = ""
    files: tuple[str, ...] = ("predict.py",)
    replace: Mapping[str, str] = field(default_factory=dict)
    stubs: tuple[str, ...] = ()
    tolerance: float = 1e-2
    on_cpu: Mapping[str, str] = field(default_factory=_CPU.copy)

    def text(self, source: str) -> str:
        """A file of it as it is served."""
        for old, new in {**self.on_cpu, **self.replace}.items():
            source = source.replace(old, new)
        return source

    @property
    def steps(self) -> tuple[int, ...]:
        """The denoising steps of each request; 0 if it does not say."""
        return tuple(inputs.get("num_inference_steps", inputs.get("steps", 0)) for inputs in self.requests)


def picture(width: int, height: int) -> str:
    """The data URL of a picture of noise."""
    pixels = numpy.random.default_rng(_SEED).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def build_classifier(folder: Path) -> None:
    """ViT."""
    labels = {0: "normal", 1: "nsfw"}
    model = ViTForImageClassification(ViTConfig(**_VISION, id2label=labels))
    model.save_pretrained(folder / "Falconsai/nsfw_image_detection")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "Falconsai/nsfw_image_detection")


def build_z_image(folder: Path) -> None:
    """As pipelines.py."""
    pipeline = build_pipeline(SHAPES["tiny-z-image"], TOKENIZERS, torch.device("cpu"))
    pipeline.save_pretrained(folder / "Tongyi-MAI/Z-Image-Turbo")


def build_siglip(folder: Path) -> None:
    """Two towers."""
    texts = {**_SMALL, "vocab_size": _WORDS, "max_position_embeddings": 64, "projection_size": 32}
    folder = folder / "google/siglip-base-patch16-224"
    SiglipModel(SiglipConfig(text_config=texts, vision_config=_VISION)).save_pretrained(folder)
    tokenizer = build_tokenizer(_WORDS)
    tokenizer.pad_token, tokenizer.model_max_length = "w1", 64
    SiglipProcessor(SiglipImageProcessor(size={"height": 32, "width": 32}), tokenizer).save_pretrained(folder)


def build_modernbert(folder: Path, words: int = _WORDS, **sizes: Any) -> None:
    """Four layers: one of three looks at all words. `sizes` are those that are not tiny."""
    tokenizer = build_tokenizer(words)
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    tokenizer.save_pretrained(folder / "checkpoints")
    special = {name: 1 for name in ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")}
    config = ModernBertConfig(**{**_SMALL, "num_hidden_layers": 4, **sizes}, vocab_size=len(tokenizer), **special)
    ModernBertForMaskedLM(config).save_pretrained(folder / "checkpoints")


def build_clip(folder: Path) -> None:
    """Two towers, and real words."""
    folder.joinpath("model_cache/models--openai--clip-vit-large-patch14").mkdir(parents=True)
    texts = clip_config(_SMALL, "quick_gelu").to_dict()
    folder = folder / "openai/clip-vit-large-patch14"
    CLIPModel(CLIPConfig(text_config=texts, vision_config=_VISION, projection_dim=32)).save_pretrained(folder)
    CLIPProcessor(_image_processor(), CLIPTokenizer.from_pretrained(TOKENIZERS / "tokenizer")).save_pretrained(folder)


def _image_processor() -> CLIPImageProcessor:
    return CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


def _stable_diffusion() -> StableDiffusionPipeline:
    return StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=CLIPTextModel(clip_config(_SMALL, "quick_gelu")),
        tokenizer=CLIPTokenizer.from_pretrained(TOKENIZERS / "tokenizer"),
        unet=UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(16, 32),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
            norm_num_groups=2,
        ),
        scheduler=PNDMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True),
        safety_checker=StableDiffusionSafetyChecker(CLIPConfig(vision_config=_VISION, projection_dim=32)),
        feature_extractor=_image_processor(),
    )


def _vae() -> AutoencoderKL:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    return AutoencoderKL(**blocks, block_out_channels=(8, 8, 8, 8), latent_channels=4, norm_num_groups=2)


def build_stable_diffusion(folder: Path) -> None:
    """A safety checker that lets everything pass: its concepts are at distance 1."""
    pipeline = _stable_diffusion()
    pipeline.save_pretrained(folder / "stabilityai/stable-diffusion-2-1")
    pipeline.safety_checker.save_pretrained(folder / "CompVis/stable-diffusion-safety-checker")


def build_img2img(folder: Path) -> None:
    """Stable Diffusion, with its checker."""
    _stable_diffusion().save_pretrained(folder / "cache")


def build_upscaler(folder: Path) -> None:
    """Three of one shape, and the network that doubles their latents."""
    pipeline = _stable_diffusion()
    for name in ("stabilityai/stable-diffusion-2-1", "runwayml/stable-diffusion-v1-5", "andite/anything-v4.0"):
        pipeline.save_pretrained(folder / name)
    unet = UNet2DConditionModel(
        act_fn="gelu",
        attention_head_dim=8,
        norm_num_groups=None,
        block_out_channels=(32, 32, 64, 64),
        time_cond_proj_dim=160,
        conv_in_kernel=1,
        conv_out_kernel=1,
        cross_attention_dim=32,
        down_block_types=("KDownBlock2D", *["KCrossAttnDownBlock2D"] * 3),
        up_block_types=(*["KCrossAttnUpBlock2D"] * 3, "KUpBlock2D"),
        in_channels=8,
        out_channels=5,
        mid_block_type=None,
        only_cross_attention=False,
        resnet_time_scale_shift="scale_shift",
        time_embedding_type="fourier",
        timestep_post_act="gelu",
    )
    parts = {"vae": pipeline.vae, "text_encoder": pipeline.text_encoder, "tokenizer": pipeline.tokenizer}
    scheduler = EulerDiscreteScheduler(prediction_type="sample")
    upscaler = StableDiffusionLatentUpscalePipeline(unet=unet, scheduler=scheduler, **parts)
    upscaler.save_pretrained(folder / "stabilityai/sd-x2-latent-upscaler")


_FLUX: dict[str, Any] = {
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 4, 8),
    "guidance_embeds": True,
}


def build_flux_controlnet(folder: Path) -> None:
    """FLUX.1 and a ControlNet of seven modes. What the ControlNet begins with as zero is random."""
    t5 = {"vocab_size": 32128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    tiny = SHAPES["tiny-sdxl"]
    pipeline = build_flux(Shape(build_flux, _FLUX, t5, tiny.vae, _SMALL), TOKENIZERS)
    pipeline.save_pretrained(folder / "FLUX.1-dev")
    network = FluxControlNetModel(in_channels=64, num_mode=7, **_FLUX)
    fill(network)
    network.save_pretrained(folder / "FLUX.1-dev-ControlNet-Union-Pro")


def fill(network: nn.Module) -> None:
    """Make parameters random that are zero."""
    for parameter in network.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)


def build_gemma(folder: Path, name: str = "gemma-cache") -> None:
    """No token ends the text."""
    heads = {"num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False}
    config = GemmaConfig(**_SMALL, **heads, vocab_size=_WORDS, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    GemmaForCausalLM(config).save_pretrained(folder / name)
    build_tokenizer(_WORDS).save_pretrained(folder / name)


def build_phi(folder: Path) -> None:
    """No token ends the text."""
    config = PhiConfig(**_SMALL, vocab_size=_WORDS, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    PhiForCausalLM(config).save_pretrained(folder / "microsoft/phi-2")
    build_tokenizer(_WORDS).save_pretrained(folder / "microsoft/phi-2")


def build_hunyuan_video(folder: Path) -> None:
    """A text encoder of real words: the template that comes before a prompt must have 95 tokens or more."""
    network = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=32,
        pooled_projection_dim=32,
        rope_axes_dim=(4, 4, 8),
    )
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )
    tokenizer = CLIPTokenizer.from_pretrained(TOKENIZERS / "tokenizer")
    HunyuanVideoPipeline(
        text_encoder=LlamaModel(LlamaConfig(**_SMALL, vocab_size=49408)),
        tokenizer=tokenizer,
        transformer=network,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=CLIPTextModel(clip_config(_SMALL, "quick_gelu")),
        tokenizer_2=tokenizer,
    ).save_pretrained(folder / "checkpoints")


def build_whisper(folder: Path, words: int = 0, **sizes: Any) -> None:
    """Bytes, so many words, and the tokens that Whisper has beside words. `sizes` are those that are not tiny."""
    special = ["<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"]
    special += ["<|nospeech|>", "<|notimestamps|>", *(f"<|{number / 50:.2f}|>" for number in range(1501))]
    texts = [*pre_tokenizers.ByteLevel.alphabet(), *(f"w{word}" for word in range(words)), "<|endoftext|>"]
    vocabulary = {name: number for number, name in enumerate([*texts, *special])}
    tokenizer = WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": special[:8]})
    end, start = vocabulary["<|endoftext|>"], vocabulary["<|startoftranscript|>"]
    special_ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    towers = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 80}
    config = WhisperConfig(**{**widths, **towers, **sizes}, vocab_size=len(vocabulary), **special_ids)
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        is_multilingual=False,
        no_timestamps_token_id=vocabulary["<|notimestamps|>"],
        max_initial_timestamp_index=50,
        return_timestamps=True,
        **special_ids,
    )
    model.save_pretrained(folder / "openai/whisper-large-v3")
    sounds = WhisperFeatureExtractor(feature_size=config.num_mel_bins)
    WhisperProcessor(sounds, tokenizer).save_pretrained(folder / "openai/whisper-large-v3")


def build_lora(folder: Path) -> None:
    """SDXL as pipelines.py, and a LoRA of its attention. Needs peft, as the predictor does."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipeline = build_pipeline(SHAPES["tiny-sdxl"], TOKENIZERS, torch.device("cpu"))
    pipeline.save_pretrained(folder / "stabilityai/stable-diffusion-xl-base-1.0")
    layers = ["to_q", "to_k", "to_v", "to_out.0"]
    pipeline.unet.add_adapter(LoraConfig(r=4, target_modules=layers, init_lora_weights=False))
    weights = convert_state_dict_to_diffusers(get_peft_model_state_dict(pipeline.unet))
    StableDiffusionXLPipeline.save_lora_weights(folder / "latent-consistency/lcm-lora-sdxl", weights)


def build_rmbg(folder: Path) -> None:
    """The predictor's own network, of which `replace` makes a narrow one."""
    sys.path.insert(0, str(folder))
    from briarmbg import BriaRMBG

    folder.joinpath("checkpoints").mkdir()
    torch.save(BriaRMBG().state_dict(), folder / "checkpoints/model.pth")


def sound(seconds: float) -> str:
    """The data URL of noise."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16000, 0, "NONE", ""))
        noise = numpy.random.default_rng(_SEED).integers(-9000, 9000, int(16000 * seconds), dtype=numpy.int16)
        writer.writeframes(noise.tobytes())
    return f"data:audio/wav;base64,{base64.b64encode(file.getvalue()).decode()}"


_DRAW = {
    "prompt": "a lighthouse",
    "negative_prompt": "fog",
    "num_inference_steps": 2,
    "guidance_scale": 7.5,
    "scheduler": "DPMSolverMultistep",
    "seed": 1,
}
_FEW = {"default=768": "default=128", "default=50": "default=2", "(512, 512)": "(64, 64)"}
# The widths of RMBG's decoder, whose inputs are two pictures at once.
_DECODER = ("1024,256,512", "1024,128,256", "512,64,128", "256,32,64", "128,16,64")
_GENERATE = {"max_new_tokens": 8, "min_new_tokens": -1, "temperature": 1.0, "top_p": 1.0, "top_k": 1}

PREDICTORS = {
    "nsfw": Public(
        "classifier of pictures",
        "lucataco/cog-nsfw_image_detection",
        "8d4a26d230fb76759c122713a2d11676294557eb",
        build_classifier,
        ({"image": picture(64, 64)}, {"image": picture(48, 80)}),
        replace={"return output\n": "return str(logits.tolist())\n"},
        tolerance=1e-4,
    ),
    "z-image": Public(
        "text to image",
        "replicate/cog-examples",
        "84811a745b4b2e4f144349677831ecbb00dd7bbc",
        build_z_image,
        ({"prompt": "w3 w4"}, {"prompt": "w3 w4 w5 w6"}),
        folder="z-image-turbo",
        replace={"=1024": "=64", "steps=9": "steps=3"},
        tolerance=3e-2,
    ),
    "siglip": Public(
        "classifier by labels",
        "lucataco/cog-SigLip",
        "8aae7cad3dcfe9fc51a1dfe4cf37985d304ac01a",
        build_siglip,
        ({"image": picture(64, 64), "candidate_labels": "w1,w2 w3,w4"},),
        replace={"return str(result)": 'return str([found["score"] for found in result])', ", 4)": ", 9)"},
        tolerance=1e-3,
    ),
    "modernbert": Public(
        "text encoder",
        "lucataco/cog-ModernBERT-large",
        "c2ad88303fe06ef647f69a5d75cfff876e47fcc4",
        build_modernbert,
        ({"prompt": "w3 w4 [MASK]"}, {"prompt": "w3 w4 w5 w6 [MASK]"}),
        replace={"return predicted_token": "return str(outputs.logits[0, masked_index].tolist())"},
        tolerance=3e-2,
    ),
    "clip": Public(
        "encoder of pictures and texts",
        "zsxkib/cog-openai-clip",
        "cdc9d188e99b3f129e6dbb710703b65bb20d5753",
        build_clip,
        ({"text": "a lighthouse"}, {"image": picture(64, 64)}),
        replace={"_features.tolist()": "_features.pooler_output.tolist()"},
        stubs=("helpers.py",),
        tolerance=1e-4,
    ),
    "stable-diffusion": Public(
        "text to image",
        "replicate/cog-stable-diffusion",
        "fab8ea5d0d61b77bd0cb624357d5b8aa89863750",
        build_stable_diffusion,
        ({**_DRAW, "width": 128, "height": 128, "num_outputs": 1},),
        replace=_FEW,
    ),
    "img2img": Public(
        "image to image",
        "lucataco/cog-realistic-vision-v5-img2img",
        "231cef6fd2552cd1a7655176b94da70ea33a6fc5",
        build_img2img,
        tuple({"image": picture(*size), "prompt": "a cat", "steps": 4, "seed": 1} for size in ((64, 64), (96, 64))),
        replace={
            **_FEW,
            "default=30": "default=4",
            "(image, 1024)": "(image, 64)",
            ".from_single_file(": ".from_pretrained(",
            '"https://huggingface.co/stabilityai/sd-vae-ft-mse-original/blob/main/'
            'vae-ft-mse-840000-ema-pruned.safetensors"': '"cache/vae"',
        },
    ),
    "flux-controlnet": Public(
        "ControlNet, two networks",
        "lucataco/cog-flux-controlnet-union-pro",
        "c83fca6c7798bfb67f96cf4360c75133daf71579",
        build_flux_controlnet,
        ({"prompt": "a cat", "steps": 2, "control_image": picture(64, 64), "seed": 1},),
        replace={**_FEW, "default=28": "default=2"},
        tolerance=3e-2,
    ),
    "upscaler": Public(
        "upscaler, four networks",
        "chenxwh/cog-sd-upscaler",
        "418f86bcee5e003f885e30382bc6a7e915a5fef7",
        build_upscaler,
        tuple(
            {**_DRAW, "width": 128, "height": 128, "model": model}
            for model in ("stable-diffusion-2-1", "stable-diffusion-v1-5")
        ),
        replace={**_FEW, "num_inference_steps=20": "num_inference_steps=3"},
    ),
    "gemma": Public(
        "chat, streaming",
        "chenxwh/cog-gemma",
        "d391eca84343519c9cdf69bc46db2bcaed56bd34",
        build_gemma,
        ({"prompt": "w3 w4 w5", **_GENERATE, "repetition_penalty": 1.0},),
        replace={"default=256": "default=8", "torch.bfloat16": "torch.float32"},
    ),
    "phi": Public(
        "chat",
        "lucataco/cog-phi-2",
        "7c2aa9a37f1a410c48ad333ddc03ce185cff594a",
        build_phi,
        ({"prompt": "w3 w4 w5", "max_length": 12},),
        replace={"default=200": "default=12"},
        stubs=("weights_downloader.py",),
    ),
    "hunyuan-video": Public(
        "video",
        "lucataco/cog-hunyuanvideo-community",
        "bc8a7efc4f883f0d3dd61816e3b5498cc38bb0b7",
        build_hunyuan_video,
        ({"prompt": "a cat", "width": 64, "height": 64, "num_frames": 5, "num_inference_steps": 2, "seed": 1},),
        replace={
            "default=960": "default=64",
            "default=544": "default=64",
            "default=61": "default=5",
            "default=30": "default=2",
            "from diffusers.utils import export_to_video": "from media import export_to_video",
        },
        stubs=("media.py",),
        tolerance=3e-2,
    ),
    "whisper": Public(
        "speech to text",
        "anotherjesse/torch-hacker",
        "e44ed4d16963dbc79f10170340a7251734d990fd",
        build_whisper,
        ({"audio": sound(2.0)},),
        folder="models/whisper-v3-large",
        replace={
            "import torch\n": "import torch\nfrom media import read_sound\n",
            'self.pipe("original.wav")': 'self.pipe(read_sound("original.wav"))',
            "max_new_tokens=128": "max_new_tokens=8",
        },
        stubs=("media.py",),
    ),
    "rmbg": Public(
        "segmentation",
        "chenxwh/cog-RMBG",
        "0537c3ee045991402b4e534227487a08f778438c",
        build_rmbg,
        ({"image": picture(64, 64)},),
        files=("predict.py", "briarmbg.py", "utilities.py"),
        replace={
            "[1024, 1024]": "[96, 96]",
            **{f"({widths})": "(32,16,16)" for widths in _DECODER},
            **{str(width): "16" for width in (512, 256, 128, 64)},
            "from skimage import io": "import media as io",
            "from torchvision.transforms.functional import normalize": "from media import normalize",
        },
        stubs=("media.py",),
    ),
    "lora": Public(
        "text to image, LoRA",
        "anotherjesse/torch-hacker",
        "e44ed4d16963dbc79f10170340a7251734d990fd",
        build_lora,
        ({"prompt": "a cat", "seed": 1, "steps": 2, "guidance_scale": 1.0},),
        folder="models/sdxl-lcm",
        replace={"default=4": "default=2"},
    ),
    "vllm": Public(
        "chat, asynchronous; the engine is ours",
        "replicate/cog-vllm",
        "69318dfcf366bd5ecd8e33a37bb145cb73e59484",
        partial(build_gemma, name="weights"),
        ({"prompt": "w3 w4 w5", "max_tokens": 5, "temperature": 0.0},),
        files=("predict.py", "prompt_templates.py"),
        replace={
            "await resolve_model_path(str(weights))": '"weights"',
            "if not weights:": "if False:",
            "from vllm.engine.arg_utils import": "from vllm import",
            "from vllm.sampling_params import": "from vllm import",
            "from utils import resolve_model_path\n": "",
            "self.log(": "print(",
            "cog.emit_metric(": "print(",
            "default=512": "default=5",
        },
        stubs=("vllm.py",),
    ),
}
