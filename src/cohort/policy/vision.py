"""Models that read images or sound beside text: they are trained on text alone, and what else they have is kept."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn


def reads_images(config: Any) -> bool:
    """Whether a config is that of a whole model of transformers for text and images, not of its language model."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return (
        config is not None and hasattr(config, "vision_config") and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    )


PLACEHOLDERS = tuple(f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index"))
"""Names in a config of the ids of tokens that stand for an image, a video or sound."""


def placeholder_ids(config: Any) -> frozenset[int]:
    """The ids of tokens that stand for what is not text, in whose place some models put something else than the token's
    embedding even without an image (Gemma 4). None for models of text alone."""
    if not reads_images(config):
        return frozenset()
    found = (getattr(config, name, None) for name in PLACEHOLDERS)
    return frozenset(one for one in found if isinstance(one, int) and one >= 0)


PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def processor_files(model: Any, *, download: bool = False) -> list[Path]:
    """The files, beside those of its tokenizer, that tell how a model's images and sound are prepared, from where the
    model was loaded. Training needs none of them: what it saves is to be used with them again."""
    from transformers.utils import cached_file

    if not reads_images(getattr(model, "config", None)):
        return []
    found: list[str | None] = []
    with suppress(Exception):  # the name of no folder or hub id, as of a model built in memory, or there is no network
        for name in PROCESSOR_FILES:
            options = {"local_files_only": not download, "_raise_exceptions_for_missing_entries": False}
            found.append(cached_file(model.config._name_or_path, name, **options))
    return [Path(one) for one in found if one]


def auto_class(config: Any) -> Any:
    """The class of transformers that loads all of a model, so that what is saved loads wherever the model came from.
    ``AutoModelForCausalLM`` knows few of the models that read images, and loads the language model alone of some."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def untrained_modules(model: Any) -> dict[str, nn.Module]:
    """The modules with weights of their own that are no part of the language model, by name; none in other models."""
    if not reads_images(getattr(model, "config", None)):
        return {}
    used = {id(module) for part in (model.get_decoder(), model.get_output_embeddings()) for module in part.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if id(module) not in used and next(module.parameters(recurse=False), None) is not None
    }


def freeze_the_rest(model: Any) -> None:
    """Freeze what no text reaches: ``untrained_modules``."""
    for module in untrained_modules(model).values():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False
