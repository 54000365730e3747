"""How a model of sentence-transformers makes a vector of its tokens', by the files beside its weights."""

import json
from pathlib import Path


def own_length(folder: Path) -> int | None:
    """The most tokens of a text, if the model's files say it."""
    file = folder / "sentence_bert_config.json"
    return json.loads(file.read_text()).get("max_seq_length") if file.exists() else None


def pooling(folder: Path) -> tuple[bool, bool]:
    """Whether a vector is the mean of its tokens' (else the first one's), and whether it has length 1."""
    modules = {m["type"].rpartition(".")[2]: m["path"] for m in json.loads((folder / "modules.json").read_text())}
    config = json.loads((folder / modules["Pooling"] / "config.json").read_text())
    modes = {mode for mode, is_on in config.items() if is_on is True} | {config.get("pooling_mode")}
    has_mean = bool(modes & {"pooling_mode_mean_tokens", "mean"})
    has_first = bool(modes & {"pooling_mode_cls_token", "cls"})
    if set(modules) - {"Transformer", "Pooling", "Normalize"} or has_mean == has_first:
        raise ValueError(f"the model needs more than the mean or the first token: {modules}, {modes}")
    return has_mean, "Normalize" in modules
