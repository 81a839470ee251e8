"""What is made of a script's arguments: adapters, quantization, mixtures of data; and the names that scripts import."""

import json

import pytest

import cohort.trl
from cohort.errors import ConfigError
from cohort.trl import DatasetMixtureConfig, ModelConfig, get_dataset, get_peft_config, get_quantization_config


def test_adapters():
    assert get_peft_config(ModelConfig()) is None
    made = get_peft_config(
        ModelConfig(use_peft=True, lora_r=4, lora_target_modules=["q_proj", "v_proj"], use_dora=True)
    )
    assert (made.r, made.lora_alpha, made.lora_dropout, made.task_type) == (4, 32, 0.05, "CAUSAL_LM")
    assert (made.target_modules, made.use_dora, made.bias) == ({"q_proj", "v_proj"}, True, "none")


def test_quantization():
    assert get_quantization_config(ModelConfig()) is None
    assert get_quantization_config(ModelConfig(load_in_8bit=True)).load_in_8bit
    made = get_quantization_config(ModelConfig(load_in_4bit=True, dtype="bfloat16", use_bnb_nested_quant=True))
    assert (made.bnb_4bit_quant_type, made.bnb_4bit_use_double_quant) == ("nf4", True)
    assert str(made.bnb_4bit_compute_dtype) == "torch.bfloat16"


@pytest.fixture
def mixture(tmp_path):
    def make(*fractions, **more):
        parts = []
        for number, fraction in enumerate(fractions):
            path = tmp_path / f"{number}.jsonl"
            rows = [{"prompt": f"{number}/{row}", "extra": row} for row in range(10 * (number + 1))]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            part = {"path": "json", "data_files": str(path), "columns": ["prompt"]}
            parts.append(part if fraction is None else part | {"fraction": fraction})
        return DatasetMixtureConfig(datasets=parts, **more)

    return make


def test_mixtures(mixture, tmp_path, monkeypatch):
    rows = get_dataset(mixture(None, None))["train"]
    assert (rows.column_names, len(rows), rows[0]["prompt"], rows[29]["prompt"]) == (["prompt"], 30, "0/0", "1/19")
    rows = get_dataset(mixture(3.0, 1.0))["train"]  # 10 rows are three quarters of 13.3
    assert [row.partition("/")[0] for row in rows["prompt"]] == ["0"] * 10 + ["1"] * 3
    assert {split: len(rows) for split, rows in get_dataset(mixture(None, test_split_size=2)).items()} == {
        "train": 8,
        "test": 2,
    }


@pytest.mark.parametrize(
    ("fractions", "more", "message"),
    [
        ((), {}, "datasets is empty"),
        ((1.0, None), {}, "for all 2 data sets of the mixture or for none"),
        ((1.0, 0.0), {}, "fraction, above 0"),
        ((1.0,), {"streaming": True}, "streamed data have no length"),
    ],
)
def test_mistakes_in_mixtures(mixture, fractions, more, message):
    with pytest.raises(ConfigError, match=message):
        get_dataset(mixture(*fractions, **more))


def test_a_data_set_without_a_path():
    with pytest.raises(ConfigError, match="a data set of the mixture needs path"):
        DatasetMixtureConfig(datasets=[{"name": "main"}])


def test_names_that_are_not_there():
    with pytest.raises(ImportError, match="cohort.trl has no SFTTrainer: .* import other names from trl"):
        from cohort.trl import SFTTrainer  # noqa: F401
    with pytest.raises(ImportError, match="did you mean GRPOTrainer"):
        _ = cohort.trl.GRPOTrainr
    with pytest.raises(ImportError, match="cohort.trl has no is_conversational: .* import other names from trl"):
        from cohort.trl import is_conversational  # noqa: F401
    assert not hasattr(cohort.trl, "__path_hooks__")
