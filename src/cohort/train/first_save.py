"""The first save of a run, loaded again: what is saved must be what is trained. An adapter is saved without the model
that it belongs to, and hooks are not saved at all, so equal weights do not show it: logits of a few tokens do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cohort.config import ModelConfig
from cohort.errors import ModelError
from cohort.parallel.full import released
from cohort.policy import Policy, Precision, has_adapters, load_model
from cohort.policy.choose import MAX_GAP, own_logits, relative_gaps, token_source
from cohort.policy.device import preserved
from cohort.policy.narrow import changed_call
from cohort.rollout.local.backend import free_bytes

log = logging.getLogger("cohort.train")
TOKENS = 8
"""Length of the text."""
LEAST = 1e-3
"""Relative error of logits that two devices, and merging, explain in float32."""
COPIES = 3
"""The main memory that loading needs, in sizes of the model in its master dtype."""


class FirstSave:
    """Compares the first save with the policy, once, and tells of a difference.

    Args:
        policy: the policy. Only one with adapters or hooks is compared.
        config: how models are loaded.
        is_wanted: whether anything is compared.
    """

    def __init__(self, policy: Policy, config: ModelConfig, *, is_wanted: bool) -> None:
        odd = has_adapters(policy.model) or bool(changed_call(policy.model.modules()))
        self._is_wanted = is_wanted and odd and not getattr(policy.model, "is_quantized", False)
        self._policy, self._config = policy, config
        self._saved: tuple[Path, Tensor] | None = None

    @torch.no_grad()
    def will_save(self, folder: Path) -> None:
        """The policy as it is now will be in this folder. Every rank must call."""
        if self._is_wanted and self._saved is None:
            tokens = token_source(self._policy)(TOKENS)
            with released(self._policy.model):
                self._saved = folder, own_logits(self._policy, tokens, TOKENS).cpu()

    def look(self, tell: Callable[[str], object] = log.warning) -> None:
        """Compare once the save is complete. For the rank that writes."""
        if not self._is_wanted or self._saved is None or not self._saved[0].exists():
            return
        self._is_wanted = False
        folder, expected = self._saved
        free, size = free_bytes(torch.device("cpu")), sum(one.numel() for one in self._policy.model.parameters())
        if free is not None and free < COPIES * size * self._policy.precision.master.itemsize:
            log.info("%s is not loaded again for a comparison: memory is short", folder)
            return
        try:
            found = self._loaded(folder)
        except ModelError as error:
            tell(f"what is saved cannot be loaded by itself, and needs what this script makes: {error}")
            return
        gap = float(relative_gaps(found, expected).median())
        if not gap <= max(LEAST, MAX_GAP[self._policy.precision.compute]):
            tell(
                f"what is saved is not what is trained: {folder}, loaded again, has logits that are off by {gap:.2g}: "
                "an adapter is loaded with the model that its adapter_config.json names (base_model_name_or_path), so "
                "save a model that was changed in memory and start from that folder; hooks and replaced functions are "
                "not saved"
            )

    @torch.no_grad()
    def _loaded(self, folder: Path) -> Tensor:
        precision = Precision(self._policy.precision.master, self._policy.precision.master)
        with preserved():  # adapters are initialized with random numbers before their weights are read
            model = load_model(
                str(folder),
                precision,
                torch.device("cpu"),
                trust_remote_code=self._config.trust_remote_code,
                allow_pickled_weights=self._config.allow_pickled_weights,
            )
        return own_logits(Policy(model, precision), token_source(self._policy)(TOKENS), TOKENS)
