"""Sizes that a config tells: how many tokens a model can read, and how wide it is."""

from __future__ import annotations

from typing import Any

from cohort.policy.vision import placeholder_ids


def context_length(config: Any) -> int | None:
    """The maximum number of tokens of a model, prompt and completion together. None if its config has no limit. With
    longrope it is ``longrope_length``."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if isinstance(length := getattr(config, name, None), int) and length > 0:
            return min(length, longrope_length(config) or length)
    return longrope_length(config)


def longrope_length(config: Any) -> int | None:
    """The number of tokens from which on longrope has other factors (Phi-3, Phi-4); None for other models. A text that
    grows beyond it is drawn with two sets of factors, and a pass over the whole text would use one."""
    given = getattr(config, "rope_parameters", None)
    found = given if isinstance(given, dict) else {}
    ropes = [rope for rope in (found, *found.values()) if isinstance(rope, dict)]  # or one for each type of layer
    lengths = [rope.get("original_max_position_embeddings") for rope in ropes if rope.get("rope_type") == "longrope"]
    return min((length for length in lengths if isinstance(length, int) and length > 0), default=None)


def hidden_size(config: Any) -> int:
    """H; 0 if the config has none. A config that reads images has it in that of its language model."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(config, "hidden_size", 0) or 0)


def known_tokens(model: Any, config: Any) -> tuple[int | None, frozenset[int]]:
    """The number of tokens that a model has embeddings for, and the ids among them that stand for what is not text; see
    ``PromptSet.check_tokens``.

    Args:
        model: a loaded model, which is asked itself, or anything else.
        config: the config of the whole model.
    """
    size = getattr(config.get_text_config(), "vocab_size", None)
    if hasattr(model, "get_input_embeddings"):
        found = (model.get_input_embeddings(), model.get_output_embeddings())
        size = min((len(one.weight) for one in found if hasattr(one, "weight")), default=size)
    return size if isinstance(size, int) and size > 0 else None, placeholder_ids(config)
