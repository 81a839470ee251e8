"""Reward models: the output of a sequence classifier for prompt and completion."""

from unittest.mock import Mock

import pytest
import torch

from cohort.errors import ModelError, RewardError
from cohort.rewards import resolve_reward
from cohort.rewards.model import RewardModel
from tests.conftest import each
from tests.rewards.conftest import rollout

TEXTS = [("1+2=", "3"), ("10+20=", "31"), ("7+7=", "14 "), ("1+2=", "99999")]


def classifier(tokenizer, **changes):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(3)
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,
        "num_labels": 1,
        "pad_token_id": tokenizer.pad_token_id,
    } | changes
    return LlamaForSequenceClassification(LlamaConfig(**settings)).eval()


def one_by_one(model, tokenizer, texts, **tokens):
    """The reference: one text at a time, without padding."""
    ids = [torch.tensor([tokenizer(text, **tokens)["input_ids"]]) for text in texts]
    with torch.no_grad():
        return [model(input_ids=row).logits[0, 0].item() for row in ids]


@each(("batch_tokens", "pads"), [(1, True), (20, True), (8192, True), (8192, False)])
def test_a_padded_batch_equals_one_text_at_a_time(demo_tokenizer, batch_tokens, pads):
    model = classifier(demo_tokenizer, **({} if pads else {"pad_token_id": None}))
    judge = RewardModel(model, demo_tokenizer, batch_tokens=batch_tokens)
    prompts, completions = zip(*TEXTS, strict=True)
    expected = one_by_one(model, demo_tokenizer, [p + c for p, c in TEXTS])
    # float32: padding changes the order of summation
    assert judge(prompts, completions) == pytest.approx(expected, abs=1e-5)
    assert len({round(number, 3) for number in expected}) == 4


def test_a_conversation_is_rendered_by_the_template_of_the_model(demo_tokenizer):
    model = classifier(demo_tokenizer)
    judge = RewardModel(model, demo_tokenizer)
    asked = [{"role": "user", "content": "1+2"}]
    answered = [*asked, {"role": "assistant", "content": "carry 3"}]
    text = demo_tokenizer.apply_chat_template(answered, tokenize=False)
    expected = one_by_one(model, demo_tokenizer, [text], add_special_tokens=False)
    written = [{"role": "assistant", "content": "3"}]
    begun = [*asked, {"role": "assistant", "content": "carry "}]
    # The prefill is part of the message: added by the template, or a message to continue.
    judge.tokenizer = Mock(wraps=demo_tokenizer)
    parts = [{"role": "user", "content": [{"type": "text", "text": one} for one in ("1+", "2")]}]
    for prompt in (asked, begun, parts):
        assert judge([prompt], [written], prefills=["carry "]) == pytest.approx(expected, abs=1e-6)
    assert judge.tokenizer.call_args.kwargs == {"add_special_tokens": False}  # the template wrote them


def test_a_transcript_is_rendered_whole(demo_tokenizer):
    model = classifier(demo_tokenizer)
    asked = [{"role": "user", "content": "1+2"}]
    transcript = [{"role": "assistant", "content": "4"}, {"role": "user", "content": "0"}]
    transcript.append({"role": "assistant", "content": "3"})
    text = demo_tokenizer.apply_chat_template([*asked, *transcript], tokenize=False)
    assert text == "<|user|>1+2<|assistant|>4<|end|><|user|>0<|assistant|>3<|end|>"
    expected = one_by_one(model, demo_tokenizer, [text], add_special_tokens=False)
    assert RewardModel(model, demo_tokenizer)([asked], [transcript]) == pytest.approx(expected, abs=1e-6)


def test_a_completion_that_does_not_fit_is_unscored_not_truncated(demo_tokenizer, runner_of):
    judge = RewardModel(classifier(demo_tokenizer), demo_tokenizer)
    scores = runner_of(judge).score(rollout(["3", "9" * 80]))
    assert not scores.rewards_S[0].isnan()
    assert "prompt and completion have 82 tokens, the reward model's context 64" in scores.errors[1]


def test_a_folder_is_loaded_with_its_tokenizer(demo_tokenizer, tmp_path):
    model = classifier(demo_tokenizer)
    model.save_pretrained(tmp_path / "judge")
    with pytest.raises(ModelError, match="holds no tokenizer"):
        RewardModel(tmp_path / "judge")
    demo_tokenizer.save_pretrained(tmp_path / "judge")
    judge = RewardModel(tmp_path / "judge", device="cpu")
    assert judge.__name__ == "judge"
    by_name = resolve_reward(f"{tmp_path}/judge(batch_tokens=64, device='cpu')")
    assert (by_name.__name__, by_name.batch_tokens) == ("judge", 64)
    with pytest.raises(RewardError, match="has no setting 'batch'; it has: .*batch_tokens"):
        resolve_reward(f"{tmp_path}/judge(batch=64)")
    with pytest.raises(ModelError, match="no folder of that name here"):
        resolve_reward("models/judge")
    # Another memory alignment may change the order of summation.
    assert judge(["1+2="], ["3"]) == pytest.approx(RewardModel(model, demo_tokenizer)(["1+2="], ["3"]), abs=1e-6)


def test_unsuitable_models_are_refused(demo_tokenizer, demo_model_path, tmp_path):
    with pytest.raises(RewardError, match="expected one label, its config has 3"):
        RewardModel(classifier(demo_tokenizer, num_labels=3), demo_tokenizer)
    with pytest.raises(RewardError, match="no saved tokenizer: pass RewardModel"):
        RewardModel(classifier(demo_tokenizer))
    with pytest.raises(RewardError, match=r"score.weight are missing; a causal language model becomes a reward model"):
        RewardModel(demo_model_path)
    with pytest.raises(RewardError, match="batch_tokens must be at least 1"):
        RewardModel(classifier(demo_tokenizer), demo_tokenizer, batch_tokens=0)
    judge = RewardModel(classifier(demo_tokenizer), demo_tokenizer)
    judge.tokenizer = type("Plain", (), {"chat_template": None})()
    with pytest.raises(RewardError, match="no chat template for conversations"):
        judge([[{"role": "user", "content": "1"}]], ["1"])
