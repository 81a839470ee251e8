"""What ranks run in tests of the launcher, instead of Cohort: ``python -m stub WHAT``."""

import os
import signal
import sys
import time


def main(what):
    rank = int(os.environ["RANK"])
    print(f"rank {rank} of {os.environ['WORLD_SIZE']}, {os.environ['OMP_NUM_THREADS']} threads, {sys.argv[2:]}")
    if what == "disagree" and rank == 1:
        sys.exit("cohort: error: the disk of this machine is full")
    if what == "agree":
        if rank == 0:
            time.sleep(0.5)  # it reports later than the other, which must not end it
        print("cohort: error: reward broke", file=sys.stderr)
        sys.exit(2)
    if what in ("wait", "disagree"):
        try:
            time.sleep(120)
        except KeyboardInterrupt:
            print("cohort: interrupted", file=sys.stderr)
            sys.exit(130)
    exchange(rank, what)


def exchange(rank, what):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if what == "raise" and rank == 1:
        raise ValueError("boom")
    if what == "kill":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher: a busy machine may be late with the traceback
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)  # fails when the other rank has ended
    dist.destroy_process_group()
    print(f"sum {total.item():g}")


if __name__ == "__main__":
    main(sys.argv[1])
