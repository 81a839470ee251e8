"""The seccomp filter, run as the kernel runs it."""

import errno
import struct

import pytest

from cohort.errors import SandboxError
from cohort.sandbox.process import DENIED, system_call_filter

ALLOW, KILL = 0x7FFF0000, 0x80000000
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(machine: str, number: int, argument: int = 0, architecture: int | None = None) -> int:
    steps = list(struct.iter_unpack("HBBI", system_call_filter(machine)))
    data = struct.pack("<IIQ6Q", number, architecture or ARCHITECTURE[machine], 0, argument, 0, 0, 0, 0, 0)
    at, value = 0, 0
    while True:
        code, if_so, if_not, operand = steps[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: value == operand, 0x25: value > operand, 0x45: bool(value & operand)}[code]
            at += if_so if holds else if_not


@pytest.mark.parametrize(
    ("machine", "read", "execve", "clone", "pair", "prctl"),
    [("x86_64", 0, 59, 56, 53, 157), ("aarch64", 63, 221, 220, 199, 167)],
)
def test_verdicts(machine, read, execve, clone, pair, prctl):
    def fails(error):
        return 0x50000 | error

    assert verdict(machine, read) == verdict(machine, execve) == ALLOW
    assert verdict(machine, read, architecture=0x40000003) == KILL  # 32-bit x86
    threads, process, namespace = 0x3D0F00, 0x1200011, 0x10000000
    assert verdict(machine, clone, threads) == ALLOW
    assert verdict(machine, clone, process) == verdict(machine, clone, namespace) == fails(errno.EPERM)
    assert verdict(machine, 435) == verdict(machine, 457) == verdict(machine, 0x40000000) == fails(errno.ENOSYS)
    assert verdict(machine, pair, 1) == ALLOW
    assert {verdict(machine, pair, domain) for domain in (2, 10, 16, 17, 40)} == {fails(errno.EAFNOSUPPORT)}
    assert verdict(machine, prctl, 1) == fails(errno.EPERM)
    assert verdict(machine, prctl, 15) == ALLOW
    numbers = [row[0 if machine == "x86_64" else 1] for row in DENIED.values()]
    assert {verdict(machine, number) for number in numbers if number is not None} == {fails(errno.EPERM)}


def test_the_list_is_complete():
    assert len(DENIED) == 92
    assert sum(number or 0 for row in DENIED.values() for number in row) == 38992  # no number has changed
    with pytest.raises(SandboxError, match="no filter for riscv64: it runs on x86_64 and aarch64"):
        system_call_filter("riscv64")
