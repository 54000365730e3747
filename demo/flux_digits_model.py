"""The untrained parts of the tiny Flux model: prompts, tokenizers, text encoders, autoencoder and transformer."""

import random

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from read_digits import DIGIT_WORDS
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

TEXT_WIDTH = 64

TEMPLATES = (
    "{}",
    "a {}",
    "draw {}",
    "digit {}",
    "number {}",
    "the digit {}",
    "the number {}",
    "handwritten {}",
    "a handwritten {}",
    "a handwritten digit {}",
    "the handwritten number {}",
    "a picture of a {}",
    "a photo of a handwritten {}",
    "a drawing of the digit {}",
    "please write the number {}",
    "a {} in black ink",
    "a {} on white paper",
    "a handwritten {} in black ink on white paper",
)
FILLERS = (
    "an image sketch scan pencil pen small big bold thin nice simple single clear clean dark light "
    "style by hand with for me this that is show make paint write figure numeral character symbol"
)


def word_list() -> list[str]:
    """Return every word that is one token; the digits' names come first."""
    words = [*DIGIT_WORDS, *(word for template in TEMPLATES for word in template.split()), *FILLERS.split()]
    return [word for word in dict.fromkeys(words) if word != "{}"]


def build_clip_tokenizer() -> CLIPTokenizer:
    """Byte-pair tokenizer: all bytes, and merges that build each word letter by letter."""
    symbols = sorted(ByteLevel.alphabet())
    vocab = [*symbols, *(symbol + "</w>" for symbol in symbols)]
    merges = []
    for word in word_list():
        pieces = [*word[:-1], word[-1] + "</w>"]
        for end in range(1, len(pieces)):
            merges.append(("".join(pieces[:end]), pieces[end]))
            vocab.append("".join(pieces[: end + 1]))
    vocab = [*dict.fromkeys(vocab), "<|startoftext|>", "<|endoftext|>"]
    ids = {token: index for index, token in enumerate(vocab)}
    return CLIPTokenizer(vocab=ids, merges=list(dict.fromkeys(merges)), model_max_length=77)


def build_t5_tokenizer() -> T5Tokenizer:
    """Unigram tokenizer: the words, also capitalised, and single characters for the rest."""
    words = [spelling for word in word_list() for spelling in (word, word.capitalize())]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    vocab += [("▁" + word, -2.0) for word in [*dict.fromkeys(words), *"0123456789"]]
    vocab += [(chr(code), -8.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)


def filler_prompt(name: str, rng: random.Random) -> str:
    """Set a digit's name among random words and letters, so that only the name counts."""
    letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 8)))
    words = rng.sample([*FILLERS.split(), "a", "the", "of", letters], k=rng.randint(1, 6))
    words.insert(rng.randint(0, len(words)), name)
    return " ".join(words)


def prompts_for(digit: int, rng: random.Random) -> list[str]:
    """Return the training prompts of one digit. Each digit has equally many."""
    names = (DIGIT_WORDS[digit], str(digit))
    prompts = [template.format(name) for template in TEMPLATES for name in names]
    prompts += [prompt[0].upper() + prompt[1:] for prompt in prompts]
    prompts += [filler_prompt(name, rng) for name in names for _ in range(40)]
    return [prompt + rng.choice(("", "", "", ".", "!")) for prompt in prompts]


def build_text_encoders(clip_vocab: CLIPTokenizer, t5_vocab: T5Tokenizer) -> tuple[CLIPTextModel, T5EncoderModel]:
    """Return the two frozen random text encoders."""
    clip = CLIPTextConfig(
        vocab_size=len(clip_vocab),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_factor=4.0,
        bos_token_id=clip_vocab.bos_token_id,
        eos_token_id=clip_vocab.eos_token_id,
        pad_token_id=clip_vocab.pad_token_id,
    )
    t5 = T5Config(
        vocab_size=len(t5_vocab),
        d_model=TEXT_WIDTH,
        d_kv=32,
        d_ff=2 * TEXT_WIDTH,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    return CLIPTextModel(clip).eval(), T5EncoderModel(t5).eval()


def build_vae() -> AutoencoderKL:
    """Autoencoder with a scale factor of 8: (N, 3, H, W) to (N, 4, H/8, W/8)."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 24, 32, 48),
        norm_num_groups=8,
        latent_channels=4,
        sample_size=64,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


def build_transformer() -> FluxTransformer2DModel:
    """Flux transformer of width 128: 2 double blocks and 4 single ones."""
    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(4, 14, 14),
    )


def build_pipeline() -> FluxPipeline:
    """Put the untrained parts together."""
    tokenizer, tokenizer_2 = build_clip_tokenizer(), build_t5_tokenizer()
    text_encoder, text_encoder_2 = build_text_encoders(tokenizer, tokenizer_2)
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=build_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        transformer=build_transformer(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
