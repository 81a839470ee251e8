"""CUDA tensors without data, on a machine without a GPU: torch's CUDA build computes their shapes, dtypes and devices.

Tensors on the CPU are real. An operation that mixes devices fails as on a GPU, and so does what CUDA refuses otherwise
(``tests/cuda_rules/rules.py``) and an operation that CUDA does not have; every value that is read from a GPU is a wait
for it, and is recorded with the line of Cohort that reads it. Values that are read are made up: numbers are finite.
"""

import ctypes
import traceback
from collections import Counter
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from tests.cuda_rules.rules import Refused, check, known_autocast

aten = torch.ops.aten
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
HOLDS = {"all", "isfinite", "mul"}
"""Operations whose boolean results say that numbers are finite."""
KEYS = "CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd"


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
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        check(func, args, kwargs)
        if func.namespace == "aten" and not any(has_kernel(func.name(), key) for key in KEYS):
            raise Refused(f"CUDA does not have {func}")
        if func is aten._local_scalar_dense.default:
            self._read()
            kind = args[0].dtype
            if kind == torch.bool:
                return getattr(args[0], "holds", False)
            return self.number if kind.is_floating_point else int(self.number)
        if func is aten.equal.default:
            self._read()
            return True
        if func is aten.nonzero.default:
            self._read()
            return self._empty((1, args[0].ndim), torch.int64, args[0].device)
        if fake and device is not None and not on_cuda:  # from the GPU to the CPU
            self._read()
            known = getattr(args[0], "known", None)
            return self._made_up(args[0].shape, kwargs.get("dtype") or args[0].dtype) if known is None else known
        if func is aten.bincount.default:
            self._read()
            least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
            return self._empty((max(least, 1),), torch.int64, args[0].device)
        if not fake and tensors:  # from the CPU to the GPU
            moved = self._empty(tensors[0].shape, kwargs.get("dtype") or tensors[0].dtype, torch.device(device))
            moved.known = tensors[0].to(moved.dtype)  # until something is written to it
            return moved
        if func._schema.is_mutable:
            for one in fake:
                one.known = None
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if name in HOLDS and isinstance(out, FakeTensor):
            out.holds = True
        if isinstance(out, FakeTensor) and out.device.type == "cpu":
            self._read()
            return self._made_up(out.shape, out.dtype)
        return out

    def _made_up(self, shape, dtype):
        return torch.full(shape, self.number).to(dtype)

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


def driver():
    """The library of ``no_driver.c``; None: it is not preloaded, and nothing can run backward."""
    found = ctypes.CDLL(None)
    return ctypes.c_int.in_dll(found, "fake_devices") if hasattr(found, "fake_devices") else None


def run_backward(*args, **kwargs):
    """A backward pass in the calling thread: those of devices would ask the driver."""
    devices = driver()
    assert devices is not None, "preload tests/gpu/no_driver.c, as make fake-cuda does"
    devices.value = 64
    try:
        with torch.autograd.set_multithreading_enabled(False):
            return _run_backward(*args, **kwargs)
    finally:
        devices.value = 0


_run_backward = torch.autograd.graph._engine_run_backward


@contextmanager
def fake_cuda():
    """A machine with an H100 whose memory holds nothing."""
    answers = {
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.is_bf16_supported": lambda *_, **__: True,
        "torch.cuda.mem_get_info": lambda *_: (80 * 2**30, 80 * 2**30),
        "torch.cuda.memory_reserved": lambda *_: 0,
        "torch.cuda.memory_allocated": lambda *_: 0,
        "torch.cuda.max_memory_allocated": lambda *_: 0,
        "torch.cuda.reset_peak_memory_stats": lambda *_: None,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.autograd._engine_run_backward": run_backward,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch(name, answer))
        stack.enter_context(known_autocast())
        machine = FakeCUDA()
        stack.enter_context(patch.object(FakeTensor, "tolist", machine.tolist))
        yield stack.enter_context(machine)
