"""What CUDA's operations refuse, as a table: the stand-ins on a CPU (``tests/cuda_on_cpu.py``) and CUDA tensors without
data (``tests/gpu/fake.py``) both apply it. A CPU takes many of these calls, and so do the formulas of fake tensors.

A rule is a function of an operation's arguments by name. It returns why CUDA refuses the call, or None. Also refused is
what CUDA would compute by a fallback that nobody would run on purpose: products of experts with a wait for the GPU in
each layer. ``SOURCES`` says where in PyTorch 2.13 each rule stands.
"""

import functools
import sys
import threading
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HALF = torch.bfloat16, torch.float16
ATEN = "aten/src/ATen/native"


class Refused(RuntimeError):  # noqa: N818 - it says what happened
    """CUDA would refuse this call."""


def alike(given, *names):
    """Tensors, or lists of them, of one dtype."""
    dtypes = {name: str(part.dtype) for name in names for part in tree_leaves(given.get(name)) if part is not None}
    return f"different dtypes: {dtypes}" if len(set(dtypes.values())) > 1 else None


def flash_forward(given):
    q, k, v = given["query"], given["key"], given["value"]
    starts = [given["cum_seq_q"], given["cum_seq_k"]]
    if q.dtype not in HALF:
        return f"only float16 and bfloat16, not {q.dtype}"
    if reason := alike(given, "query", "key", "value"):
        return reason
    if any(part.stride(-1) != 1 for part in (q, k, v)):
        return "the last dimension must be contiguous"
    if any(part.dtype != torch.int32 or not part.is_contiguous() for part in starts):
        return "cumulative lengths must be contiguous int32"
    if starts[0].shape != starts[1].shape or len(starts[0]) < 2:
        return "as many queries' lengths as keys', and at least one"
    width, heads = q.shape[-1], q.shape[-2]
    if width > 256 or width % 8:
        return f"a head dimension that is a multiple of 8 up to 256, not {width}"
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or k.shape[-1] != width or heads % k.shape[-2]:
        return f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    return None


def flash_backward(given):
    if reason := flash_forward(given) or alike(given, "query", "grad_out", "out"):
        return reason
    q, lse = given["query"], given["logsumexp"]
    if lse.dtype != torch.float32 or not lse.is_contiguous() or lse.shape != (q.shape[1], q.shape[0]):
        return f"log-sum-exps must be contiguous float32, one for each head and query, not {lse.dtype} {lse.shape}"
    same = q.shape == given["out"].shape == given["grad_out"].shape
    return None if same else "outputs and their gradients must have the queries' shape"


def only_cpu(given):
    return "CUDA does not have it"


def products(*names):
    """Products of factors of one dtype, which must not be integers."""

    def rule(given):
        some = [given[name] for name in names]
        whole = not some[0].dtype.is_floating_point
        return "CUDA has no products of integers" if whole else alike(given, *names)

    return rule


def products_into(*names):
    """Products of half-precision factors with a result of another dtype, into which a summand may be added."""

    def rule(given):
        reason, out = products(*names)(given), given["out_dtype"]
        factor = given[names[-1]].dtype
        if reason is None and out != factor and not (out == torch.float32 and factor in HALF):
            return f"{out} of factors in {factor}"
        given_out = given.get("out")
        if reason is None and given_out is not None and given_out.dtype != out:
            return f"out is {given_out.dtype}, and out_dtype {out}"
        summand = given.get("input", given.get("self")) if len(names) == 2 and "batch1" not in names else None
        if reason is None and "mat1" in names and summand is not None and summand.dtype not in {out, factor}:
            return f"a summand in {summand.dtype}"
        return reason

    return rule


def grouped(given):
    a, b, offsets = (given[name] for name in ("self", "mat2", "offs"))
    if a.dtype != b.dtype or a.dtype not in {torch.float32, *HALF}:
        return f"{a.dtype} and {b.dtype}"
    if _AUTOCAST[-1:] == [True] and a.dtype != torch.bfloat16:  # a run in float32 has no better product
        return f"{a.dtype}: only bfloat16 has a kernel; the rest waits for the GPU and loops over experts"
    if offsets is not None and offsets.dtype != torch.int32:
        return "offsets must be int32"
    for part in (a, b):
        large = [stride for size, stride in zip(part.shape[-2:], part.stride()[-2:], strict=True) if stride != 1]
        if any(stride * part.element_size() % 16 for stride in large):
            return f"strides must be multiples of 16 bytes: {tuple(part.shape)}, {part.stride()}"
    return None


_AUTOCAST = []
"""Whether it is on, for each block that is open. (Inside of a dispatch mode, torch says that it is off.)"""


@contextmanager
def known_autocast():
    """Note inside the block which blocks of autocast are open."""
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    def noted_enter(block):
        _AUTOCAST.append(block._enabled)
        return enter(block)

    def noted_leave(block, *error):
        _AUTOCAST.pop()
        return leave(block, *error)

    with mock.patch.multiple(torch.autocast, __enter__=noted_enter, __exit__=noted_leave):
        yield


def norm(given):
    return alike(given, "input", "weight", "bias")


def sorted_alike(given):
    return alike(given, "sorted_sequence", "self") if isinstance(given["self"], Tensor) else None


def fused_optimizer(given):
    states = ["self", "grads", "exp_avgs", "exp_avg_sqs", "momentum_buffer_list"]
    if reason := alike(given, *states):
        return reason
    for name in states[1:]:
        for parameter, other in zip(given["self"], given.get(name) or (), strict=False):
            if (parameter.shape, parameter.stride()) != (other.shape, other.stride()):
                return f"{name} must have the sizes and strides of the parameters"
    if any(step.dtype != torch.float32 for step in given.get("state_steps") or ()):
        return "steps must be float32"
    return None


def indexed(source, *indices):
    """A source of the dtype that it is written to, by indices in int64 or int32."""

    def rule(given):
        kinds = {str(given[name].dtype) for name in indices if given.get(name) is not None}
        wrong = kinds - {"torch.int64", "torch.int32"}
        return f"indices in {wrong}" if wrong else alike(given, "self", source)

    return rule


def single(*names):
    """Only float32 and wider."""

    def rule(given):
        return next((f"not in {given[name].dtype}" for name in names if given[name].dtype in HALF), None)

    return rule


def convolved(given):
    return alike(given, "input", "weight", "bias")


RULES = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_flash_attention_for_cpu": only_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": only_cpu,
    "histogram": only_cpu,
    "_linear_pointwise": only_cpu,
    "_reorder_linear_weight": only_cpu,
    "linear": products("input", "weight"),
    "mm": products("self", "mat2"),
    "bmm": products("self", "mat2"),
    "addmm": products("self", "mat1", "mat2"),
    "addmm_": products("self", "mat1", "mat2"),
    "baddbmm": products("self", "batch1", "batch2"),
    "baddbmm_": products("self", "batch1", "batch2"),
    "mm.dtype": products_into("self", "mat2"),
    "mm.dtype_out": products_into("self", "mat2"),
    "bmm.dtype": products_into("self", "mat2"),
    "bmm.dtype_out": products_into("self", "mat2"),
    "addmm.dtype": products_into("mat1", "mat2"),
    "addmm.dtype_out": products_into("mat1", "mat2"),
    "_grouped_mm": grouped,
    "rms_norm": norm,
    "_fused_rms_norm": norm,
    "layer_norm": norm,
    "native_layer_norm": norm,
    "searchsorted": sorted_alike,
    "_fused_adam_": fused_optimizer,
    "_fused_adamw_": fused_optimizer,
    "index_add_": indexed("source", "index"),
    "index_add": indexed("source", "index"),
    "index_copy_": indexed("source", "index"),
    "index_copy": indexed("source", "index"),
    "index_put_": indexed("values"),
    "scatter_add_": indexed("src", "index"),
    "scatter_add": indexed("src", "index"),
    "scatter_reduce": indexed("src", "index"),
    "scatter_": lambda given: indexed("src", "index")(given) if isinstance(given.get("src"), Tensor) else None,
    "embedding": lambda given: indexed("self", "indices")(given | {"self": given["weight"]}),
    "linalg_solve_triangular": single("self", "B"),
    "convolution": convolved,
}
"""By the name of an operation, or of one overload of it."""

SOURCES = {
    "_flash_attention": f"{ATEN}/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd and mha_varlen_bwd",
    "_scaled_dot_product_flash_attention_for_cpu": f"{ATEN}/native_functions.yaml: dispatch of CPU alone",
    "histogram": f"{ATEN}/native_functions.yaml: dispatch of CPU alone",
    "_linear_pointwise": f"{ATEN}/mkldnn/Linear.cpp, operations of oneDNN",
    "_reorder_linear_weight": f"{ATEN}/mkldnn/Linear.cpp, operations of oneDNN",
    "linear": f"{ATEN}/cuda/Blas.cpp, addmm_out_cuda_impl",
    "mm": f"{ATEN}/cuda/Blas.cpp, _mm_dtype_out_cuda",
    "bmm": f"{ATEN}/cuda/Blas.cpp, bmm_out_cuda_impl and _bmm_dtype_cuda",
    "addmm": f"{ATEN}/cuda/Blas.cpp, addmm_out_cuda_impl and _addmm_dtype_out_cuda",
    "baddbmm": f"{ATEN}/cuda/Blas.cpp, bmm_out_cuda_impl",
    "_grouped_mm": f"{ATEN}/cuda/GroupedBlas.cpp, _grouped_mm_cuda; {ATEN}/GroupedMMUtils.h",
    "rms_norm": f"{ATEN}/layer_norm.cpp: another weight's dtype takes the composite formula",
    "_fused_rms_norm": f"{ATEN}/cuda/layer_norm_kernel.cu",
    "layer_norm": f"{ATEN}/cuda/layer_norm_kernel.cu, LayerNormKernelImpl",
    "native_layer_norm": f"{ATEN}/cuda/layer_norm_kernel.cu, LayerNormKernelImpl",
    "searchsorted": f"{ATEN}/BucketizationUtils.h, searchsorted_pre_check",
    "_fused_adam": f"{ATEN}/ForeachUtils.h, check_fast_path_restrictions; {ATEN}/cuda/FusedAdamKernel.cu",
    "index": f"{ATEN}/TensorAdvancedIndexing.cpp and cuda/Indexing.cu",
    "scatter": f"{ATEN}/TensorAdvancedIndexing.cpp, scatter_meta_impl",
    "embedding": f"{ATEN}/cuda/Embedding.cu",
    "linalg_solve_triangular": f"{ATEN}/cuda/linalg/BatchLinearAlgebra.cpp: float, double and complex",
    "convolution": f"{ATEN}/Convolution.cpp, check_input_same_type_as_parameters",
}
"""Where a rule stands, by the beginning of an operation's name."""


@functools.cache
def rule_of(func):
    """The rule of an operation of ``torch.ops.aten``; None: there is none."""
    name = func.overloadpacket.__name__
    return RULES.get(f"{name}.{func._overloadname}") or RULES.get(name)


def why_refused(func, args, kwargs):
    """Why CUDA refuses a call of an operation; None: it takes it."""
    rule = rule_of(func)
    if rule is None:
        return None
    names = [argument.name for argument in func._schema.arguments]
    given = dict.fromkeys(names) | dict(zip(names, args, strict=False)) | dict(kwargs or {})
    return rule(given)


def check(func, args, kwargs):
    """Raise ``Refused`` for a call that CUDA refuses."""
    if reason := why_refused(func, args, kwargs):
        raise Refused(f"CUDA refuses {func}: {reason}")


class Rules(TorchDispatchMode):
    """Checks every operation of this thread."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        rule = rule_of(func)
        if rule is not None and (rule is not only_cpu or _called_by_python()):
            check(func, args, kwargs)
        if func in OPENED:  # inference mode leaves them whole
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


OPENED = {torch.ops.aten.matmul.default, torch.ops.aten.einsum.default}
"""Operations that consist of others, which have rules."""


def _called_by_python():
    """Whether Python code has called the operation itself, and not an operation or a backward pass of torch."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.endswith(("torch/_compile.py", "torch/_dynamo/eval_frame.py")):  # around the mode
        frame = frame.f_back
    return frame.f_code.co_filename.endswith("torch/_ops.py")


@contextmanager
def cuda_rules():
    """Apply the rules inside the block, in this thread and in those that it starts."""
    run = threading.Thread.run

    def with_rules(thread):
        with Rules():
            run(thread)

    with mock.patch.object(threading.Thread, "run", with_rules), known_autocast(), Rules():
        yield
