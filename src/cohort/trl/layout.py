"""How the ranks hold what is trained, from the settings of DeepSpeed and FSDP, neither of which is used itself."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cohort.errors import ConfigError

STAGES = ("replicate", "optimizer", "optimizer", "full")
"""ZeRO stages 0 to 3."""
STRATEGIES = {
    **dict.fromkeys(("true", "full_shard", "1", "hybrid_shard", "4"), "full"),
    **dict.fromkeys(("false", "shard_grad_op", "2", "hybrid_shard_zero2", "5"), "optimizer"),
    **dict.fromkeys(("no_shard", "3"), "replicate"),
}
"""FSDP's strategies, by name and by accelerate's number, and ``reshard_after_forward`` of FSDP2."""


def layout_of(args: Any, variables: Mapping[str, str] = os.environ) -> str:
    """``parallel.layout`` for ``args.deepspeed`` or ``args.fsdp``, or for what ``accelerate launch`` has put into the
    environment.

    Raises:
        ConfigError: a configuration cannot be read, or offloads to the CPU or a disk.
    """
    if args.deepspeed:
        return _of_deepspeed(args.deepspeed)
    if args.fsdp:
        options = args.fsdp_config or {}
        return _of_fsdp(options.get("reshard_after_forward", True), options.get("cpu_offload", False))
    if variables.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        if file := variables.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
            return _of_deepspeed(file)
        prefix = "ACCELERATE_DEEPSPEED_"
        stage, devices = variables.get(f"{prefix}ZERO_STAGE", "2"), ("OPTIMIZER", "PARAM")
        offloads = {
            f"offload_{name.lower()}": {"device": variables.get(f"{prefix}OFFLOAD_{name}_DEVICE", "none")}
            for name in devices
        }
        return _of_deepspeed({"zero_optimization": {"stage": stage, **offloads}})
    if variables.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        second = variables.get("FSDP_VERSION") == "2"
        strategy = variables.get("FSDP_RESHARD_AFTER_FORWARD" if second else "FSDP_SHARDING_STRATEGY", "true")
        return _of_fsdp(strategy, variables.get("FSDP_OFFLOAD_PARAMS"))
    return "replicate"


def _of_deepspeed(given: Any) -> str:
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        config = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
        zero = config.get("zero_optimization", {})
        layout = STAGES[int(zero.get("stage", 0))]
        devices = {zero.get(f"offload_{part}", {}).get("device", "none") for part in ("optimizer", "param")}
    except (OSError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"deepspeed: expected a configuration, its JSON or its file, got {given!r:.80} ({error})"
        ) from None
    if devices - {"none", None}:
        raise ConfigError("deepspeed offloads weights or the optimizer, which is not supported here: use stage 3 alone")
    return layout


def _of_fsdp(strategy: Any, offload: Any) -> str:
    if str(offload).lower() == "true":
        raise ConfigError("fsdp offloads weights to the CPU, which is not supported here: use full_shard alone")
    if (found := STRATEGIES.get(str(strategy).lower())) is None:
        raise ConfigError(f"fsdp: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    return found
