"""Models that read images train on text alone, through their language model, and are saved whole."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from cohort.config import LoraConfig, ModelConfig
from cohort.errors import DataError
from cohort.policy import Policy, load_policy, reads_images
from cohort.policy.lean import LeanLayers
from cohort.policy.load import hidden_size
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.rollout.checks import describe_policy
from cohort.rollout.engine import Request
from tests.families.configs import ATTENTION
from tests.policy.plain import SINGLE, assert_plain
from tests.rollout.test_local_engine import LetterTokenizer, prompts

# peft asks transformers for something by its old name; pytest makes warnings errors.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
MODELS = {  # settings of the language model, of what reads images, and of the whole
    "qwen2_5_vl": (
        ATTENTION | ROPE,
        {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
        | {"patch_size": 4, "fullatt_block_indexes": [0]},
        dict.fromkeys(TOKENS, 36),
    ),
    "gemma3": (
        ATTENTION | {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"patch_size": 4, "image_size": 8, "vision_use_head": False},
        {"mm_tokens_per_image": 4, "image_token_index": 36, "boi_token_index": 36, "eoi_token_index": 36},
    ),
}
GEMMA4 = (
    ATTENTION | {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 37, "global_head_dim": 16}
    | {"num_kv_shared_layers": 0},
    {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    | {"patch_size": 4},
    {"image_token_id": 7, "video_token_id": 8, "audio_token_id": 9},
)  # fmt: skip


def made(kind):
    text, vision, whole = GEMMA4 if kind == "gemma4" else MODELS[kind]
    cls = CONFIG_MAPPING[kind]
    torch.manual_seed(0)
    parts = {"text_config": text, "vision_config": vision}
    return AutoModelForImageTextToText.from_config(cls(**parts, **whole))


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param)
    made(request.param).save_pretrained(place)
    return place


def test_text_trains_the_language_model_alone(folder):
    policy = load_policy(str(folder), ModelConfig(precision="float64"), None)
    assert reads_images(policy.model.config)
    assert hidden_size(policy.model.config) == policy.model.get_input_embeddings().embedding_dim
    assert "on text alone: what reads images is kept as it is" in describe_policy(policy)
    assert isinstance(policy.passes.body, LeanLayers) == ("gemma3" in folder.name)
    assert_plain(policy)
    trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert trained
    assert not any("vis" in name or "projector" in name for name in trained)


def test_a_saved_model_is_whole(folder, tmp_path):
    policy = load_policy(str(folder), ModelConfig(precision="float32"), None)
    policy.model.save_pretrained(tmp_path)
    again, before = (AutoModelForImageTextToText.from_pretrained(place) for place in (tmp_path, folder))
    for (name, one), (_, other) in zip(again.named_parameters(), before.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_adapters_are_on_the_language_model(folder):
    pytest.importorskip("peft")
    policy = load_policy(str(folder), ModelConfig(precision="float32", lora=LoraConfig(rank=2)), None)
    trained = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    assert any("down_proj.lora_A" in name for name in trained)
    assert not any("vis" in name or "projector" in name for name in trained)
    assert policy.passes.shared


def test_a_model_in_memory_is_as_one_from_a_folder():
    model = made("gemma3")
    policy = Policy(model, SINGLE)
    assert "on text alone" in describe_policy(policy)


def test_tokens_that_stand_for_images_are_text_when_they_are_drawn():
    """Gemma 4 as a whole embeds padding in their place."""
    policy = Policy(made("gemma4"), SINGLE)
    assert policy.passes.shared, policy.passes.description
    engine = LocalEngine(policy, LetterTokenizer(), (1,))
    groups = engine.generate(prompts((5, 12, 20), (10,)), 8, Sampling(16), RNGKey(0, 0))
    pairs = [(group.prompt.token_ids, completion) for group in groups for completion in group.completions]
    assert any({7, 8, 9}.intersection(one.token_ids.tolist()[:-1]) for _, one in pairs)
    with torch.no_grad():
        logps_N = policy.logps([ids for ids, _ in pairs], [one.token_ids for _, one in pairs], 1.0).logps_N
    sampled_N = torch.tensor([logp for _, completion in pairs for logp in completion.sampler_logps])
    torch.testing.assert_close(sampled_N.float(), logps_N, rtol=0, atol=1e-4)  # float32, other shapes
    with pytest.raises(DataError, match="holds token 8, which stands for an image"):
        engine.submit([Request(prompts((5, 8))[0], 0, Sampling(4), RNGKey(0, 0))])
