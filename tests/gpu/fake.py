"""CUDA tensors without data, on a machine without a GPU: torch's CUDA build computes their shapes, dtypes and devices.

Tensors on the CPU are real. An operation that mixes devices fails as on a GPU; every value that is read from a GPU is a
wait for it, and is recorded with the line of Cohort that reads it. Values that are read are made up.
"""

import traceback
from collections import Counter
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


class FakeCUDA(FakeTensorMode):
    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        self.reads = Counter()
        """Values read from the GPU, by the file and function that read them."""
        self.calls = Counter()
        """Operations on CUDA tensors, by name."""
        self.number = 0.0
        """What numbers that are read from the GPU are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        fake = [value for value in tensors if isinstance(value, FakeTensor)]
        device = kwargs.get("device")
        on_cuda = device is not None and torch.device(device).type == "cuda"
        if not fake and not on_cuda:
            return func(*args, **kwargs)
        self.calls[func.overloadpacket.__name__] += 1
        if func is aten._local_scalar_dense.default:
            self._read()
            kind = args[0].dtype
            return self.number if kind.is_floating_point else kind != torch.bool and int(self.number)
        if func is aten.equal.default:
            self._read()
            return True
        if func is aten.nonzero.default:
            self._read()
            return self._empty((1, args[0].ndim), torch.int64, args[0].device)
        if not fake and tensors:  # from the CPU to the GPU
            return self._empty(tensors[0].shape, kwargs.get("dtype") or tensors[0].dtype, torch.device(device))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(out, FakeTensor) and out.device.type == "cpu":
            self._read()
            return torch.full(out.shape, self.number).to(out.dtype)
        return out

    def _empty(self, shape, dtype, device):
        made = {"dtype": dtype, "device": device}
        return super().__torch_dispatch__(aten.empty.memory_format, (), (list(shape),), made)

    @property
    def tolist(self):
        """``Tensor.tolist``, which torch computes number by number."""

        def tolist(tensor):
            self._read()
            return torch.full(tensor.shape, self.number).to(tensor.dtype).tolist()

        return tolist

    def _read(self):
        last = [frame for frame in traceback.extract_stack() if "/src/cohort/" in frame.filename][-1]
        self.reads[f"{last.filename.rsplit('/cohort/', 1)[1]} {last.name}"] += 1


@contextmanager
def fake_cuda():
    """A machine with an H100 whose memory holds nothing."""
    answers = {
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.is_bf16_supported": lambda *_, **__: True,
        "torch.cuda.mem_get_info": lambda *_: (80 * 2**30, 80 * 2**30),
        "torch.cuda.memory_reserved": lambda *_: 0,
        "torch.cuda.memory_allocated": lambda *_: 0,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch(name, answer))
        machine = FakeCUDA()
        stack.enter_context(patch.object(FakeTensor, "tolist", machine.tolist))
        yield stack.enter_context(machine)
