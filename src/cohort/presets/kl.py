"""The KL term and the entropy bonus."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cohort.presets.base import Part, PositiveInt, Weight, require

Direction = Literal["reverse", "forward"]


class KL(Part):
    """The KL term, named by its gradient. ``forward`` is KL(reference || policy), ``reverse`` KL(policy || reference).

    ``k3`` used as a loss without a ratio, as in DeepSeekMath, is direction "forward", correction "none".
    """

    rule: Literal["kl"] = "kl"
    beta: Weight = 0.0
    """Weight. 0: no KL term and no reference model."""
    direction: Direction = "reverse"
    scope: Literal["token", "sequence"] = "token"
    """The gradient of each token's conditional KL given its prefix, or that of the whole sequence's KL."""
    place: Literal["loss", "reward", "advantage"] = "loss"
    """In the loss; in the reward before baseline and scale; or in the advantage, after them."""
    correction: Literal["none", "token_ratio", "prefix_product", "sequence_weight"] = "none"
    """The importance weight of a KL in the loss whose tokens come from another policy."""
    anchor: Literal["old", "sampler"] = "old"
    """That other policy."""
    estimator: Literal["sampled", "full"] = "sampled"
    """From the sampled token, or over the vocabulary."""
    top_k: PositiveInt | None = None
    """With "full": the vocabulary's ``top_k`` most likely tokens and one bucket for the rest. Unset: all of them."""
    target: Annotated[float, Field(gt=0)] | None = None
    """Adaptive: beta moves so that the mean KL per token (k3) approaches this. Unset: beta stays."""
    horizon: PositiveInt = 10_000
    """Adaptive: completions over which beta may change by a factor of about 1.2."""

    def check(self) -> None:
        """Refuse combinations without effect, and those that are the gradient of no KL."""
        require(
            self.target is not None or self.horizon == type(self).model_fields["horizon"].default,
            "kl.horizon belongs to an adaptive KL: set kl.target",
        )
        require(self.target is None or self.beta > 0, "kl.target moves beta: set beta to the weight to begin with")
        require(self.top_k is None or self.estimator == "full", "kl.top_k belongs to kl.estimator 'full'")
        require(
            self.scope == "token" or self.correction in ("none", "sequence_weight"),
            f"kl.scope 'sequence' with kl.correction {self.correction!r} is the gradient of no KL: set "
            "kl.correction 'sequence_weight'",
        )
        require(
            self.anchor == "old" or (self.correction != "none" and self.place == "loss"),
            f"kl.anchor 'sampler' has no effect with kl.correction {self.correction!r} and kl.place {self.place!r}",
        )
        if self.estimator == "full":
            self._check_full()
        if self.place != "loss":
            self._check_outside_of_the_loss()

    def _check_full(self) -> None:
        require(self.place == "loss", "kl.estimator 'full' differentiates the logits: set kl.place 'loss'")
        require(self.scope == "token", "kl.estimator 'full' is a sum over tokens: set kl.scope 'token'")
        require(
            self.correction in ("none", "prefix_product"),
            "kl.estimator 'full' has no sampled token to correct for, only its prefix: set kl.correction 'none' or "
            "'prefix_product'",
        )

    def _check_outside_of_the_loss(self) -> None:
        require(
            self.direction == "reverse",
            f"kl.place {self.place!r} gives the reverse KL's gradient only: k3 as a reward is the reverse minus the "
            "forward KL's. Set kl.direction 'reverse'",
        )
        require(
            self.correction == "none",
            f"kl.place {self.place!r} is weighted by the ratio of the policy term already: set kl.correction 'none'",
        )
        require(
            self.place == "advantage" or self.scope == "sequence",
            "kl.place 'reward' is a reward of the whole completion: set kl.scope 'sequence', or kl.place 'advantage'",
        )

    def words(self) -> str:
        """The weight, and the gradient's multiplier kappa."""
        if self.beta == 0:
            return "beta = 0; no reference policy"
        weight = f"beta = {self.beta:g}"
        weight += f", moving toward a KL of {self.target:g} per token" if self.target else ""
        name = "KL(policy || ref)" if self.direction == "reverse" else "KL(ref || policy)"
        if self.place != "loss":
            what = (
                "sum of log(old/ref) over the completion" if self.scope == "sequence" else "log(old/ref) of the token"
            )
            return f"{weight}; {what}, subtracted from the {self.place}: the gradient of {name}"
        if self.estimator == "full":
            over = f"the {self.top_k} likeliest tokens and a bucket for the rest" if self.top_k else "the vocabulary"
            corrected = f", weighted by the product of earlier ratios to {self.anchor}" * (self.correction != "none")
            return f"{weight}; {name} over {over}{corrected}"
        kappa = {
            ("reverse", "token"): "log(policy/ref)",
            ("forward", "token"): "1 - ref/policy",
            ("reverse", "sequence"): "sum of log(policy/ref)",
            ("forward", "sequence"): "1 - product of ref/policy",
        }[self.direction, self.scope]
        correction = {
            "none": "",
            "token_ratio": f"policy/{self.anchor} * ",
            "prefix_product": f"product of policy/{self.anchor} up to the token * ",
            "sequence_weight": f"product of policy/{self.anchor} over the sequence * ",
        }[self.correction]
        k3 = " (k3 as a loss)" if self == KL(beta=self.beta, direction="forward") else ""
        return f"{weight}; the gradient of {name} per {self.scope}: kappa = {correction}{kappa}{k3}"


class EntropyBonus(Part):
    """``coefficient`` times the mean full-vocabulary entropy, added to the objective."""

    rule: Literal["entropy"] = "entropy"
    source: ClassVar[str] = "adaptive: Skywork-OR1 (arXiv 2505.22312)"
    coefficient: Weight = 0.0
    target: Annotated[float, Field(gt=0)] | None = None
    """Adaptive: the coefficient rises by ``step`` after an update whose entropy is at most this and falls otherwise;
    the bonus counts only while the entropy is at most this. Unset: the coefficient stays."""
    step: Annotated[float, Field(gt=0)] = 0.005

    def check(self) -> None:
        """Require a coefficient or a target."""
        require(
            self.coefficient > 0 or self.target is not None,
            "entropy has no effect with coefficient 0 and no target: set entropy.coefficient, or entropy 'none'",
        )

    def words(self) -> str:
        """The bonus, and how its weight moves."""
        text = f"+ {self.coefficient:g} * mean full-vocabulary entropy over the loss tokens"
        if self.target is None:
            return text
        return (
            f"{text}; the weight moves by {self.step:g} an update, up while the entropy is at most {self.target:g}, "
            "else down, and counts only then"
        )
