"""Tensors with sizes and no numbers: what a run on a GPU allocates is recorded without a GPU, and without its memory.

Large tensors are of the class ``Sized``: torch's meta kernels compute their shapes, and they claim to be on the CPU, so
that autocast acts on them. Small ones are real, as index tensors have to be. Values that are read are made up: True, 0.
Temporary memory inside of an operation is not seen.
"""

import torch

from cohort.train.memory import LiveBytes

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")
SMALL = 2**20
"""New tensors of fewer bytes are real."""


class Sized(torch.Tensor):
    """A tensor without numbers. Its storage is one of the meta device, which knows its size."""

    @staticmethod
    def __new__(cls, meta):
        made = torch.Tensor._make_subclass(cls, meta, dispatch_device=True, device_for_backend_keys=CPU)
        made.meta = meta
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = CPU

    def data_ptr(self):
        return self.meta.untyped_storage()._cdata

    def tolist(self):
        return torch.zeros(self.shape, dtype=self.dtype).tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a Sized tensor outside of Recorded")


class Recorded(LiveBytes):
    """Large tensors that are made inside the block are ``Sized``. Allocations and their ends are in ``log``: the number
    of a storage, and its size or, at the end, None; or a text that ``mark`` has put there, before anything else."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing is compiled here, and the wrapper is slow

    def __init__(self):
        super().__init__()
        self.log, self.peaks, self._numbers = [], {}, {}

    def mark(self, text):
        """Begin a phase. ``peaks`` has each phase's."""
        self.log.append((text, None))
        self._phase, self.peaks[text] = text, self.now

    def sized(self, tensor):
        """A ``Sized`` tensor of another's shape and dtype, that is allocated now."""
        made = Sized(torch.empty(tensor.shape, dtype=tensor.dtype, device=META))
        self._add(made.meta.untyped_storage())
        return made

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return CPU
        kwargs = kwargs or {}
        given = [*tensors(args), *tensors(kwargs.values())]
        if not any(type(one) is Sized for one in given):
            return self._made(func, args, kwargs, given)
        if (value := self._read(func, args, kwargs)) is not None:
            return value
        if "device" in kwargs:
            kwargs = {**kwargs, "device": META}
        back = {}
        out = func(*[as_meta(one, back) for one in args], **{key: as_meta(one, back) for key, one in kwargs.items()})
        storages = {one.untyped_storage()._cdata for one in back.values()}
        return self._wrapped(out, back, storages)

    def _made(self, func, args, kwargs, given):
        """The result of an operation without ``Sized`` tensors, which may be the first."""
        if not given and "device" in kwargs and kwargs["device"] != META:
            meta = func(*args, **{**kwargs, "device": META})
            if meta.untyped_storage().nbytes() >= SMALL:
                self._add(meta.untyped_storage())
                return Sized(meta)
        out = func(*args, **kwargs)
        before = {one.untyped_storage()._cdata for one in given}
        for one in tensors((out,)):
            if one.device == CPU and one.untyped_storage()._cdata not in before:
                if func in (aten.empty.memory_format, aten.empty_strided.default):
                    one.zero_()  # what is made up from it is no NaN
                self._add(one.untyped_storage())
        return out

    def _read(self, func, args, kwargs):
        """Made up values."""
        if func is aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool or torch.zeros(1, dtype=args[0].dtype).item()
        if func is aten.equal.default:
            return True
        if func is aten.nonzero.default:
            return torch.zeros(1, args[0].ndim, dtype=torch.int64)
        if func is aten.bincount.default:
            return torch.zeros(args[2] if len(args) > 2 else kwargs["minlength"], dtype=torch.int64)
        return None

    def _wrapped(self, out, back, storages):
        if isinstance(out, torch.Tensor):
            if id(out) in back:  # in place
                return back[id(out)]
            if out.untyped_storage()._cdata not in storages:
                self._add(out.untyped_storage())
            return Sized(out)
        if isinstance(out, tuple | list):
            return type(out)(self._wrapped(one, back, storages) for one in out)
        return out

    def _add(self, storage):
        if storage._cdata not in self._live and storage.nbytes():
            self._numbers[storage._cdata] = len(self.log)
            self.log.append((len(self.log), storage.nbytes()))
            super()._add(storage)
            self.peaks[self._phase] = max(self.peaks[self._phase], self.now)

    def _forget(self, key):
        super()._forget(key)
        self.log.append((self._numbers.pop(key), None))


def tensors(values):
    """The tensors among arguments, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors(value)


def as_meta(value, back):
    """An argument for meta kernels. ``back`` gets the given tensor of each."""
    if isinstance(value, torch.Tensor):
        meta = value.meta if type(value) is Sized else value.to(META)
        back[id(meta)] = value
        return meta
    if isinstance(value, tuple | list):
        return [as_meta(one, back) for one in value]
    return value
