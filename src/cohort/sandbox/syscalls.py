"""The system calls that a sandboxed program may make, as a seccomp filter for the kernel.

The filter denies the calls of a list, and all calls newer than the list. A denied call fails with EPERM, which Python
raises as PermissionError; the program is not killed. The arguments of three calls are checked: ``clone`` may create
threads but no processes, ``socketpair`` may create unix sockets, which asyncio needs, but no others, and ``prctl`` may
not change that a process dies with its parent, because sandboxes are ended that way.
"""

from __future__ import annotations

import errno
import platform
import struct

from cohort.errors import SandboxError

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column in the table below, and the kernel's number of the architecture."""

NEWEST = 456
"""Calls above this number fail with ENOSYS, as on a kernel that does not have them. This includes the x32 calls of x86,
whose numbers start at 2**30."""

_TABLE = (
    # New processes. A program is one process, so that its memory limit covers everything it uses.
    "fork 57 -, vfork 58 -, "
    # Namespaces and mounts.
    "unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, "
    "open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, "
    "mount_setattr 442 442, "
    # Memory and files of other processes.
    "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, kcmp 312 272, "
    "pidfd_getfd 438 438, "
    # Memory that no limit of a process covers.
    "memfd_create 319 279, memfd_secret 447 447, shmget 29 194, shmat 30 196, shmctl 31 195, shmdt 67 197, "
    "semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192, msgget 68 186, msgsnd 69 189, "
    "msgrcv 70 188, msgctl 71 187, mq_open 240 180, "
    # Sockets: connections that nobody has accepted and data that waits in messages are kernel memory.
    "socket 41 198, bind 49 200, listen 50 201, connect 42 203, accept 43 202, accept4 288 242, sendmsg 46 211, "
    "sendmmsg 307 269, "
    # Events that nobody reads are kernel memory as well.
    "inotify_init 253 -, inotify_init1 294 26, "
    # Parts of the kernel with a history of vulnerabilities.
    "add_key 248 217, request_key 249 218, keyctl 250 219, bpf 321 280, perf_event_open 298 241, "
    "userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, "
    "splice 275 76, tee 276 77, vmsplice 278 75, migrate_pages 256 238, move_pages 279 239, mbind 237 235, "
    "set_mempolicy 238 237, modify_ldt 154 -, "
    # Calls for administrators.
    "init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104, "
    "kexec_file_load 320 294, reboot 169 142, swapon 167 224, swapoff 168 225, quotactl 179 60, "
    "quotactl_fd 443 443, acct 163 89, settimeofday 164 170, clock_settime 227 112, adjtimex 159 171, "
    "clock_adjtime 305 266, sethostname 170 161, setdomainname 171 162, syslog 103 116, iopl 172 -, "
    "ioperm 173 -, personality 135 92, lookup_dcookie 212 18, name_to_handle_at 303 264, "
    "open_by_handle_at 304 265, fanotify_init 300 262, nfsservctl 180 42, uselib 134 -, sysfs 139 -, "
    "vhangup 153 58"
)
DENIED = {
    name: tuple(None if number == "-" else int(number) for number in numbers)
    for name, *numbers in (row.split() for row in _TABLE.split(","))
}
"""Name of each denied call to its numbers on x86_64 and on aarch64; None: the architecture does not have the call."""

_CLONE, _CLONE3, _SOCKETPAIR, _PRCTL = (56, 220), (435, 435), (53, 199), (157, 167)
_CLONE_THREAD, _AF_UNIX, _SET_PARENT_DEATH_SIGNAL = 0x00010000, 1, 1
_NUMBER, _ARCHITECTURE, _ARGUMENT_0 = 0, 4, 16
"""Offsets in ``struct seccomp_data``. Only the lower half of an argument is loaded: the kernel ignores the upper half
in these three calls, and both architectures are little-endian."""
_LOAD, _EQUAL, _ABOVE, _HAS_BITS, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def system_call_filter(machine: str | None = None) -> bytes:
    """The filter as a BPF program, for ``bwrap --seccomp``.

    Args:
        machine: "x86_64" or "aarch64". None: the machine of this process.

    Raises:
        SandboxError: there is no filter for the machine.

    >>> len(system_call_filter("x86_64")) % 8, len(system_call_filter("aarch64")) // 8 < 256
    (0, True)
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise SandboxError(f"the sandbox has no filter for {machine}: it runs on {' and '.join(ARCHITECTURES)}")
    column, architecture = ARCHITECTURES[machine]
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, if_so=1),
        _step(_RETURN, _KILL),  # the numbers of another architecture stand for other calls
        _step(_LOAD, _NUMBER),
    ]
    program += _fail(_ABOVE, NEWEST, errno.ENOSYS)
    program += _fail(_EQUAL, _CLONE3[column], errno.ENOSYS)  # its flags are in memory; libraries fall back to clone
    for numbers in DENIED.values():
        if (number := numbers[column]) is not None:
            program += _fail(_EQUAL, number, errno.EPERM)
    program += _check(_CLONE[column], _HAS_BITS, _CLONE_THREAD, _ALLOW, _ERRNO | errno.EPERM)
    program += _check(_SOCKETPAIR[column], _EQUAL, _AF_UNIX, _ALLOW, _ERRNO | errno.EAFNOSUPPORT)
    program += _check(_PRCTL[column], _EQUAL, _SET_PARENT_DEATH_SIGNAL, _ERRNO | errno.EPERM, _ALLOW)
    return b"".join([*program, _step(_RETURN, _ALLOW)])


def _fail(test: int, number: int, error: int) -> list[bytes]:
    return [_step(test, number, if_not=1), _step(_RETURN, _ERRNO | error)]


def _check(number: int, test: int, operand: int, if_so: int, if_not: int) -> list[bytes]:
    """Return one of two verdicts for a call, by a test of its first argument."""
    return [
        _step(_EQUAL, number, if_not=4),
        _step(_LOAD, _ARGUMENT_0),
        _step(test, operand, if_not=1),
        _step(_RETURN, if_so),
        _step(_RETURN, if_not),
    ]


def _step(code: int, value: int, *, if_so: int = 0, if_not: int = 0) -> bytes:
    """One instruction. ``if_so`` and ``if_not`` are the numbers of instructions to skip after a test."""
    return struct.pack("HBBI", code, if_so, if_not, value)
