"""Tensors in safetensors files: any dtype, any shape, tied, as the library reads them."""

import pytest
import torch
from safetensors import safe_open

from cohort.errors import NonFiniteError, RunFolderError
from cohort.runs.models import DTYPES, Stream, fill, named_weights, read_tensors, write_tensors
from tests.conftest import tiny_llama


def bits(tensor):
    return tensor.dtype, tensor.shape, bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def every_kind():
    """A tensor of each dtype, of odd sizes, with -0 and the extremes of float32; a number, an empty one, a transposed view."""
    numbers = torch.tensor([[0.0, -0.0, 1.5], [3.4028235e38, 1e-45, -3.0]])
    found = {str(dtype): (numbers > 0 if dtype == torch.bool else numbers.clamp(max=9).to(dtype)) for dtype in DTYPES}
    return found | {
        "odd/float": numbers,
        "number": torch.tensor(7.25, dtype=torch.float64),
        "empty": torch.zeros(0, 3, dtype=torch.bfloat16),
        "transposed": torch.arange(6, dtype=torch.int16).reshape(2, 3).T,
        "one byte": torch.tensor([1], dtype=torch.uint8),
    }


def test_a_file_holds_every_tensor_bit_for_bit(tmp_path):
    given = every_kind()
    write_tensors(tmp_path / "a.safetensors", Stream(given))
    read = read_tensors(tmp_path / "a.safetensors")
    assert {name: bits(tensor) for name, tensor in read.items()} == {n: bits(tensor) for n, tensor in given.items()}
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in read.values())


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_numbers_that_are_not_finite_are_not_written(tmp_path, value):
    given = {"whole": torch.ones(3), "norm/exp_avg": torch.tensor([1.0, value]).bfloat16()}
    with pytest.raises(
        NonFiniteError, match=r"^norm/exp_avg of what was to be saved has 1 NaN or infinite values of 2"
    ):
        write_tensors(tmp_path / "a.safetensors", Stream(given))


def test_no_tensors_and_one_that_cannot_be_stored(tmp_path):
    write_tensors(tmp_path / "none", Stream({}))
    assert read_tensors(tmp_path / "none") == {}
    with pytest.raises(
        RunFolderError, match=r"lm_head/phase cannot be stored in a checkpoint: it is of type torch\.com"
    ):
        write_tensors(tmp_path / "complex", Stream({"lm_head/phase": torch.zeros(2, dtype=torch.complex64)}))


def test_the_weights_of_a_model_name_tied_ones_once():
    model = tiny_llama(tie_word_embeddings=True)
    weights = named_weights(model)
    assert "model.embed_tokens.weight" in weights
    assert weights.keys() == model.state_dict().keys() - {"lm_head.weight"}
    fill(weights["model.embed_tokens.weight"], torch.ones(37, 24))
    assert model.lm_head.weight.unique().tolist() == [1]
