"""The kernels compute what torch computes, row by row; they are compiled once, kept whole, and done without where they
cannot be had."""

import ctypes
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cohort.native import Kernels, Unavailable, build
from cohort.native.decode import Gated, LayerCall, Residual
from cohort.policy import Policy, Precision
from cohort.rollout import LocalEngine
from cohort.rollout.local.cache import Heads
from cohort.rollout.local.capacity import Capacity
from cohort.rollout.local.native_slots import SlotCache
from tests import warm
from tests.conftest import each, telling, tiny_llama
from tests.rollout.conftest import cover
from tests.rollout.test_local_engine import LetterTokenizer

try:
    KERNELS = Kernels()
except Unavailable as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)

BOUND = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # of the output's own rounding; its numbers are about 1


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


# Attention


class Attention:
    """One layer, driven step by step, and the same by the formula in float64."""

    def __init__(self, kv_heads, group, width, dtype, lengths, owners, steps, *, window=None, cap=None, plain=True):
        self.sizes = kv_heads, group, width
        self.dtype, self.window, self.cap, self.owners, self.steps = dtype, window, cap, list(owners), steps
        self.cache = SlotCache(
            Capacity(len(owners), len(lengths), max(lengths), steps),
            {0: Heads(group, kv_heads, width, width)},
            dtype=dtype,
            lanes=KERNELS.lanes,
        )
        for held in (self.cache.own, self.cache.prompts):
            held.fill_(math.nan)  # what was not written is not read
        self.seen = [randn(2, length, kv_heads, width, seed=n).to(dtype) for n, length in enumerate(lengths)]
        self.put(range(len(lengths)), self.seen)
        self.slots = [*range(len(owners))][::-1]
        self.cache.add_rows(self.slots, self.owners)
        self.own = [torch.zeros(2, 0, kv_heads, width) for _ in owners]
        own, prompts = self.cache.own[:, 0], self.cache.prompts[:, 0]
        self.call = LayerCall(window=window or 0, own_k=own[0].data_ptr(), own_v=own[1].data_ptr())
        self.call.prompt_k, self.call.prompt_v = prompts[0].data_ptr(), prompts[1].data_ptr()
        self.factors, self.tables = None, None
        if not plain:
            self.factors = randn(2, width, seed=1)
            angles = randn(max(lengths) + steps, width // 2, seed=2).repeat(1, 2)
            self.tables = angles.cos(), angles.sin()
            self.call.q_norm, self.call.k_norm = (factor.data_ptr() for factor in self.factors)
            self.call.q_eps = self.call.k_eps = 1e-6
            self.call.cos, self.call.sin = (table.data_ptr() for table in self.tables)
            self.call.rotated = width

    def put(self, slots, texts):
        found = {0: [torch.cat([text[n] for text in texts]).transpose(0, 1) for n in (0, 1)]}
        self.cache.add_prompts(slots, [text.shape[1] for text in texts], found)

    def step(self, qkv, threads=2):
        """Of a ``[S, (Q + 2K) D]`` output of a product; ``[S, Q, D]``."""
        return self.attended(self.cache.next_step(self.slots), qkv, threads)

    def read(self, rows, lengths, qkv):
        """Texts of some rows: the outputs of all tokens, and those of a layer that needs only the last of each text."""
        return [self.attended(step, qkv) for step in self.cache.next_texts([self.slots[row] for row in rows], lengths)]

    def attended(self, step, qkv, threads=2):
        kv_heads, group, width = self.sizes
        out = torch.full((len(qkv), kv_heads * group, width), math.nan, dtype=self.dtype)
        call = self.call
        step.scaling, step.cap, step.threads = width**-0.5, self.cap or 0, min(threads, step.threads)
        q, k, v = qkv.split([kv_heads * group * width, kv_heads * width, kv_heads * width], -1)
        call.q, call.k, call.v, call.out = (part.data_ptr() for part in (q, k, v, out))
        call.q_stride = call.k_stride = call.v_stride = qkv.stride(0)
        call.out_stride, call.q_step = kv_heads * group * width, width
        KERNELS.attend(step, call)
        return out

    def expected(self, qkv):
        kv_heads, group, width = self.sizes
        heads = qkv.double().unflatten(-1, (-1, width)).split([kv_heads * group, kv_heads, kv_heads], 1)
        outs = []
        for row, owner in enumerate(self.owners):
            q, k, v = (part[row] for part in heads)
            place = self.seen[owner].shape[1] + self.own[row].shape[1]
            q, k = (self.prepared(part, number, place) for number, part in enumerate((q, k)))
            new = torch.stack([k, v])[:, None].to(self.dtype)
            self.own[row] = torch.cat([self.own[row].to(self.dtype), new], 1)
            keys, values = torch.cat([self.seen[owner], self.own[row]], 1).double()
            if self.window:
                keys, values = keys[-self.window :], values[-self.window :]
            scores = torch.einsum("kgd,tkd->kgt", q.unflatten(0, (kv_heads, group)), keys) * width**-0.5
            scores = scores if self.cap is None else self.cap * (scores / self.cap).tanh()
            outs.append(torch.einsum("kgt,tkd->kgd", scores.softmax(-1), values).flatten(0, 1))
        return torch.stack(outs)

    def prepared(self, x, number, place):
        if self.factors is None:
            return x
        x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.factors[number]
        cos, sin = (table[place].double() for table in self.tables)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def rows(self, step):
        kv_heads, group, width = self.sizes
        return randn(len(self.owners), kv_heads * (group + 2) * width, seed=100 + step).to(self.dtype)


LENGTHS, OWNERS = [1, 5, 16, 33], [3, 0, 1, 1, 2, 3, 3, 1, 0, 3, 3]
CASES = {
    "one row, prompt of one token": (2, 2, 32, {"lengths": [1], "owners": [0]}),
    "full slots": (1, 2, 64, {"lengths": [32, 64], "owners": [1, 0, 1], "steps": 64}),
    "width 6": (2, 1, 6, {}),
    "width 20, norms, rotation": (1, 3, 20, {"plain": False}),
    "width 72, norms, rotation": (2, 2, 72, {"plain": False}),
    "width 256": (1, 4, 256, {}),
    "window 1": (2, 2, 16, {"window": 1}),
    "window shorter than prompts": (2, 3, 48, {"window": 4, "plain": False}),
    "window 16": (1, 8, 16, {"window": 16}),
    "window 40, cap": (3, 2, 32, {"window": 40, "cap": 0.8}),
} | {f"{group} queries per key": (2, group, 16, {}) for group in (1, 2, 3, 4, 5, 6, 7, 8, 11)}


TYPED = [(case, dtype) for case in CASES for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("case", "dtype"), telling(TYPED, *TYPED[::4], *TYPED[3::4]))
def test_attention_is_the_formula(case, dtype):
    kv_heads, group, width, changes = CASES[case]
    settings = {"lengths": LENGTHS, "owners": OWNERS, "steps": 35} | changes
    attention = Attention(kv_heads, group, width, dtype, **settings)
    for step in range(settings["steps"]):
        qkv = attention.rows(step)
        expected = attention.expected(qkv)
        torch.testing.assert_close(attention.step(qkv).double(), expected, rtol=BOUND[dtype], atol=BOUND[dtype])


@pytest.mark.parametrize(
    ("group", "window", "dtype"), cover([1, 2, 3, 7], [None, 7, 7, None], [torch.float32, torch.bfloat16])
)
def test_a_row_has_the_same_bits_alone_and_on_one_thread(group, window, dtype):
    whole = Attention(2, group, 24, dtype, LENGTHS, OWNERS, 20, window=window, plain=False)
    narrow = Attention(2, group, 24, dtype, LENGTHS, OWNERS, 20, window=window, plain=False)
    alone = [Attention(2, group, 24, dtype, LENGTHS, [owner], 20, window=window, plain=False) for owner in OWNERS]
    for step in range(20):
        qkv = whole.rows(step)
        together = whole.step(qkv)
        assert torch.equal(narrow.step(qkv, threads=1), together)
        for row, one in enumerate(alone):
            assert torch.equal(one.step(qkv[row : row + 1])[0], together[row])


@pytest.mark.parametrize(
    ("group", "window", "dtype"), cover([1, 2, 3, 7], [None, 7, 7, None], [torch.float32, torch.bfloat16])
)
def test_a_text_has_the_bits_of_tokens_that_are_read_one_by_one(group, window, dtype):
    def made(owners):
        return Attention(2, group, 24, dtype, LENGTHS, owners, 40, window=window, plain=False)

    rows, lengths, ends = [2, 0], [13, 5], [12, 17]
    whole, alone = made([3, 0, 2]), {2: made([2]), 0: made([3])}
    for step in range(3):
        whole.step(whole.rows(step))
        for row, one in alone.items():
            one.step(whole.rows(step)[row : row + 1])
    qkv = randn(sum(lengths), 2 * (group + 2) * 24, seed=7).to(dtype)
    texts = zip(rows, qkv.split(lengths), strict=True)
    expected = torch.cat([alone[row].step(token) for row, text in texts for token in text.split(1)])
    every, last = whole.read(rows, lengths, qkv)
    assert torch.equal(every, expected)
    assert torch.equal(last[ends], expected[ends])
    assert last[:12].isnan().all()
    after = whole.step(whole.rows(9))
    for row, one in alone.items():
        assert torch.equal(after[row], one.step(whole.rows(9)[row : row + 1])[0])


@each("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@each("bad", [math.nan, math.inf])
def test_what_is_no_number_stays_in_its_row(bad, dtype):
    spoilt, sound = (Attention(2, 2, 24, dtype, LENGTHS, OWNERS, 20) for _ in range(2))
    for step in range(20):
        qkv = sound.rows(step)
        expected = sound.step(qkv)
        qkv[4] = bad
        out = spoilt.step(qkv)
        assert out[4].isnan().all()
        others = [row for row in range(len(OWNERS)) if row != 4]
        assert torch.equal(out[others], expected[others])


def test_slots_are_used_again():
    attention = Attention(1, 2, 16, torch.float32, [5, 9], [0, 1, 1, 0], 12)
    for step in range(5):
        qkv = attention.rows(step)
        torch.testing.assert_close(attention.step(qkv).double(), attention.expected(qkv), rtol=2e-6, atol=2e-6)
    new = randn(2, 7, 1, 16)
    attention.put([0], [new])  # rows 2 and 1 are left, and neither is after prompt 0
    attention.cache.add_rows([0, 3], [0, 1])
    attention.slots, attention.seen[0] = [1, 2, 0, 3], new
    attention.owners, empty = [1, 1, 0, 1], torch.zeros(2, 0, 1, 16)
    attention.own = [attention.own[2], attention.own[1], empty, empty]
    for step in range(5, 12):
        qkv = attention.rows(step)
        torch.testing.assert_close(attention.step(qkv).double(), attention.expected(qkv), rtol=2e-6, atol=2e-6)


# Norms and activations

SHAPES = [(1, 8), (3, 20), (8, 256), (70, 576)]


@pytest.mark.parametrize(
    ("shape", "after", "dtype"), cover(SHAPES * 2, [False, True, True], [torch.float32, torch.bfloat16])
)
def test_residual_and_norm(shape, after, dtype):
    x, update, factors = randn(*shape), randn(*shape, seed=1).to(dtype), randn(2, shape[1], seed=2)
    out, stream = torch.empty(shape, dtype=dtype), x.clone()
    call = Residual(rows=shape[0], width=shape[1], half=dtype == torch.bfloat16, threads=2, eps=1e-6, after_eps=1e-5)
    call.multiplier, call.centred = 0.5, after
    call.x, call.update, call.out, call.factor = *(t.data_ptr() for t in (stream, update, out)), factors[0].data_ptr()
    added = update.double()
    if after:
        call.after = factors[1].data_ptr()
        added = torch.nn.functional.rms_norm(added, shape[1:], factors[1].double(), 1e-5)
    KERNELS.add_norm(call)
    total = x + 0.5 * added
    norm = torch.nn.functional.layer_norm if after else torch.nn.functional.rms_norm
    expected = norm(total, shape[1:], factors[0].double(), eps=1e-6)
    torch.testing.assert_close(stream.double(), total, rtol=1e-6, atol=1e-6)  # float32
    torch.testing.assert_close(out.double(), expected, rtol=BOUND[dtype], atol=BOUND[dtype])


@pytest.mark.parametrize(
    ("shape", "gelu", "dtype"), cover(SHAPES * 2, [False, True, True], [torch.float32, torch.bfloat16])
)
def test_activation(shape, gelu, dtype):
    rows, width = shape
    both = 5 * randn(rows, 2 * width).to(dtype)
    both[0, :8] = torch.tensor([0, -0.0, 100, -100, 1e-6, math.nan, math.inf, 3e38])
    gate, up = both.split(width, -1)
    out = torch.empty(shape, dtype=dtype)
    call = Gated(rows=rows, width=width, gate_stride=2 * width, up_stride=2 * width, gelu=gelu, threads=2)
    call.half = dtype == torch.bfloat16
    call.gate, call.up, call.out = gate.data_ptr(), up.data_ptr(), out.data_ptr()
    KERNELS.activate(call)
    functional = torch.nn.functional
    activated = functional.gelu(gate.double(), approximate="tanh") if gelu else functional.silu(gate.double())
    expected = activated * up.double()
    torch.testing.assert_close(out.double(), expected.to(dtype).double(), rtol=BOUND[dtype], atol=1e-5, equal_nan=True)


# The library


SOURCE = f"void cohort_set_threads(void) {{}}\nint cohort_lanes(void) {{ return {KERNELS.lanes}; }}\n"
"""Compiled at once."""


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has not asked for the library yet, an empty folder to keep it in, and a source that is compiled at
    once."""
    (tmp_path / "source").mkdir()
    source = tmp_path / "source" / "kernels.c"
    source.write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))
    build._load_once.cache_clear()
    yield tmp_path / "cache"
    build._load_once.cache_clear()


def made(folder):
    return sorted(path.name for path in folder.iterdir())


def described():
    policy = Policy(tiny_llama(), Precision(torch.float32, torch.float32))
    return LocalEngine(policy, LetterTokenizer(), (1,)).backend.description


def test_it_is_compiled_once_and_kept(fresh, monkeypatch):
    build.load()
    (name,) = made(fresh)
    build._load_once.cache_clear()
    monkeypatch.setattr(build, "_compiled", lambda *_: pytest.fail("compiled again"))
    assert build.load().cohort_lanes() == KERNELS.lanes
    assert made(fresh) == [name]


def test_a_file_that_is_not_whole_is_made_anew(fresh):
    build.load()
    (name,) = made(fresh)
    whole = (fresh / name).read_bytes()
    for content in (b"\x7fELF of another kind", whole[:5000]):
        (fresh / name).unlink()
        (fresh / name).write_bytes(content)
        build._load_once.cache_clear()
        assert build.load().cohort_lanes() == KERNELS.lanes
        assert (fresh / name).read_bytes() == whole


@pytest.mark.parametrize("blocked", ["a file in its place", "not to be written to"])
def test_without_a_folder_to_keep_it_in_it_is_built_for_the_process(fresh, blocked):
    if blocked == "a file in its place":
        fresh.write_text("")
    else:
        fresh.mkdir(mode=0o500)
        if os.access(fresh, os.W_OK):
            pytest.skip("this user may write anywhere")
    assert build.load().cohort_lanes() == KERNELS.lanes
    assert fresh.is_file() or not made(fresh)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("there-is-no-such-compiler", "no native kernels: no C compiler ($CC is there-is-no-such-compiler)"),
        (f"{sys.executable} -c 'raise SystemExit(1)'", "failed"),
        (f"{shutil.which('cc')} -include no-such-header.h", "failed: "),
    ],
)
def test_where_it_cannot_be_built_torch_does_it_and_the_reason_is_said(fresh, monkeypatch, compiler, reason):
    monkeypatch.setenv("CC", compiler)
    description = described()
    assert "lean (llama), keys and values in float32, no native kernels" in description
    assert reason in description
    assert not fresh.exists() or made(fresh) == []


def test_without_any_compiler(fresh, monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert described().endswith("no native kernels: no C compiler (cc, gcc or clang)")


def test_on_another_system(fresh, monkeypatch):
    monkeypatch.setattr(build.sys, "platform", "win32")
    assert described().endswith("no native kernels: the system is win32")


def test_a_library_that_cannot_be_loaded(fresh, monkeypatch):
    def empty(_, workplace):
        (workplace / "decode.so").write_bytes(b"nothing")
        return workplace / "decode.so"

    monkeypatch.setattr(build, "_compiled", empty)
    assert "no native kernels: OSError" in described()


def test_kernels_that_compute_something_else_are_found_out(monkeypatch):
    monkeypatch.setattr(Kernels, "activate", lambda *_: None)
    description = described()
    assert "no native kernels: switched off" in description
    assert "lean: " in description


def test_other_precisions_go_through_torch():
    policy = Policy(tiny_llama().double(), Precision(torch.float64, torch.float64))
    description = LocalEngine(policy, LetterTokenizer(), (1,)).backend.description
    assert description == "lean (llama), keys and values in float64, no native kernels: the precision is float64"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what is loaded is read from /proc")
def test_two_processes_may_build_at_once_and_keep_one_openmp_runtime(tmp_path):
    cache, compiled = tmp_path / "cache", tmp_path / "compiled"
    count = f"""bash -c '[[ "$*" == *--version* ]] || echo compiled >> {compiled}; exec cc "$@"' cc"""
    (tmp_path / "source").mkdir()
    source = tmp_path / "source" / "kernels.c"
    source.write_text(
        f"int omp_get_num_threads(void);\n{SOURCE}int threads(void) {{ return omp_get_num_threads(); }}\n"
    )
    variables = {"COHORT_CACHE": str(cache), "CC": count, "SOURCE": str(source)}
    processes = [warm.begin(module="tests.rollout.building", **variables) for _ in range(2)]
    said = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert said == [["0"], ["0"]]
    assert compiled.read_text().splitlines() == ["compiled"]  # the second waits for the first
    (name,) = made(cache)  # nothing is left lying about
    assert ctypes.CDLL(str(cache / name)).cohort_lanes() == KERNELS.lanes


FEWER = """
import torch
from tests.rollout.test_native import LENGTHS, OWNERS, Attention
torch.set_num_threads(4)
attention = Attention(2, 2, 24, torch.float32, LENGTHS, OWNERS, 3)
qkv = attention.rows(0)
print((attention.step(qkv, threads=4) - attention.expected(qkv)).abs().max().item() < 2e-6)
"""


@pytest.mark.slow  # an interpreter of its own: the limit is read when torch is imported
def test_fewer_threads_than_were_asked_for():
    environment = os.environ | {"OMP_THREAD_LIMIT": "2"}
    done = subprocess.run([sys.executable, "-c", FEWER], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["True"]
