"""The demos set the number of torch's threads: each test gives it back."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
