"""Ranks, their exchanges and their agreement, in processes."""

import logging
import os
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from cohort import watchdog
from cohort.errors import ConfigError, RankError, RewardError
from cohort.parallel import Layout, Sharded, World, agreed, layout_of, on_main, shares, together
from cohort.parallel import layout as layouts
from cohort.parallel.world import imbalance
from cohort.runs.models import own
from tests.parallel.launching import Ranks, on_ranks


def test_one_rank_is_the_identity_and_initialises_nothing():
    world = World.of_environment({})
    assert world == World()
    assert world.gather("x") == ["x"]
    assert world.sum_(torch.ones(2)).tolist() == [1, 1]
    world.barrier()
    world.close()
    assert not torch.distributed.is_initialized()
    error = RewardError("as it is")
    with pytest.raises(RewardError) as raised:
        agreed(world, lambda: (_ for _ in ()).throw(error))
    assert raised.value is error
    assert on_main(world, lambda: 3) == together(world, lambda: 3) == 3


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "two"}, "must be a number"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "ranks count from 0"),
    ],
)
def test_wrong_variables_are_refused(variables, message):
    with pytest.raises(ConfigError, match=message):
        World.of_environment(variables)


def test_an_unknown_layout_is_refused():
    assert type(layout_of("replicate", World())) is Layout


def test_shares_are_even_and_may_be_empty():
    costs = [7, 1, 1, 1, 4, 3, 3, 2, 2]
    divided = shares(costs, 3)
    assert sorted(i for some in divided for i in some) == list(range(9))
    assert [sum(costs[i] for i in some) for some in divided] == [8, 8, 8]
    assert imbalance(costs, divided) == 1
    assert shares([5.0], 3) == [[0], [], []]
    assert imbalance([5.0], shares([5.0], 3)) == 3
    assert shares([], 2) == [[], []]
    assert imbalance([], [[], []]) == 1


class OddError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def _exchanges():
    world = World.of_environment()
    found = {"gather": world.gather({"rank": world.rank})}
    tensors = world.gather([torch.arange(1000 * world.rank)[::2], torch.tensor(1.5, dtype=torch.bfloat16), b"x" * 4083])
    found["tensors"] = [(some.sum().item(), some.dtype, number.item(), len(text)) for some, number, text in tensors]
    found["sum"] = world.sum_(torch.tensor([1.0, world.rank])).tolist()

    # Gradients: only rank 0 has the first, no rank has the last.
    parameters = [torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype)) for dtype in (torch.float32, torch.float64) * 2]
    for parameter in parameters[: 3 - 2 * world.rank]:
        parameter.grad = torch.full_like(parameter, world.rank + 1)
    Layout(world).sum_gradients(parameters)
    found["grads"] = [None if p.grad is None else p.grad.unique().tolist() for p in parameters]

    def errors():
        if world.rank == 1:
            raise RewardError("it broke")

    def interrupted():
        if world.rank == 1:
            raise KeyboardInterrupt

    def odd():
        if world.rank == 1:
            raise OddError("no", "text")

    for function in (errors, interrupted, odd):
        try:
            agreed(world, function)
        except BaseException as error:
            found[function.__name__] = (type(error).__name__, str(error), bool(error.__notes__))
    found["together"] = together(world, lambda: world.rank)
    found["main"] = on_main(world, lambda: world.rank)
    try:
        (together if world.rank else on_main)(world, [sorted, list][world.rank])
    except RankError as error:
        found["places"] = str(error)
    costs = world.costs()
    found["costs"] = costs.seconds > 0 and costs.waiting > 0 and world.costs().seconds == 0
    world.close()
    return found


def test_exchanges_and_agreement_on_two_ranks():
    first, second = on_ranks(2, _exchanges)
    assert (first.pop("together"), second.pop("together")) == (0, 1)
    assert first == second
    assert first["gather"] == [{"rank": 0}, {"rank": 1}]
    assert first["tensors"] == [(0, torch.int64, 1.5, 4083), (249500, torch.int64, 1.5, 4083)]
    assert first["sum"] == [2, 1]
    assert first["grads"] == [[3], [1], [1], None]
    assert first["errors"] == ("RewardError", "rank 1 of 2: it broke", True)
    assert first["interrupted"] == ("KeyboardInterrupt", "rank 1 of 2", True)
    assert first["odd"] == ("Exception", "rank 1 of 2: OddError: no text", True)
    assert first["main"] == 0
    assert "list" in first["places"]
    assert "sorted" in first["places"]
    assert first["costs"]


def _many_buckets():
    """What the layouts exchange in buckets of two numbers: the sums, and for each exchange how many meetings there were
    and how many tensors travelled at most at once."""
    world = World.of_environment()
    layouts.BUCKET_BYTES, seen = 16, []

    class Travelling:
        def __init__(self, work):
            self.work = work
            seen[-1]["now"] += 1
            seen[-1]["most"] = max(seen[-1]["most"], seen[-1]["now"])

        def wait(self):
            self.work.wait()
            seen[-1]["now"] -= 1

    def meet(**arguments):
        seen.append({"now": 0, "most": 0})
        return barrier(**arguments)

    barrier, dist.barrier = dist.barrier, meet

    def begin(real, *given, **arguments):
        work = real(*given, **arguments)
        return Travelling(work) if arguments.get("async_op") else work

    for name in ("all_reduce", "reduce_scatter_single", "all_gather_single"):
        setattr(dist, name, partial(begin, getattr(dist, name)))

    model = torch.nn.ParameterList(torch.nn.Parameter(torch.full((3,), float(n))) for n in range(7))
    found = []
    for layout in (Layout(world), Sharded(world)):
        parts = layout.trained(model)
        for number, parameter in enumerate(model):
            parameter.grad = torch.full((3,), number + 10.0 * world.rank)
        layout.sum_gradients(list(parts.values()))
        found.append([own(part.grad).tolist() for part in parts.values()])
        with torch.no_grad():
            for part in parts.values():
                own(part).mul_(2)
        layout.stepped()
        found.append([parameter.tolist() for parameter in model])
    world.close()
    return found, [(each["now"], each["most"]) for each in seen]


def test_buckets_travel_together_after_one_meeting():
    (first, meetings), (second, others) = on_ranks(2, _many_buckets)
    sums = [[2.0 * n + 10] * 3 for n in range(7)]
    assert first[0] == second[0] == sums
    assert first[2] == [row[:2] for row in sums]
    assert second[2] == [row[2:] for row in sums]
    assert first[1] == second[1] == [[2.0 * n] * 3 for n in range(7)]
    assert first[3] == second[3] == [[4.0 * n] * 3 for n in range(7)]
    # Of each layout, which gradients there are, then the gradients; under "optimizer" then the weights.
    assert meetings == others == [(0, 0), (0, 3), (0, 0), (0, 3), (0, 3)]


def _dies_among_buckets():
    world = World.of_environment()

    def tensors():
        yield from torch.ones(5, 4)
        if world.rank == 1:
            os._exit(7)
        yield from torch.ones(5, 4)

    return sum(len(summed) for summed in world.sums(tensors()))


def test_a_rank_that_dies_among_buckets_ends_the_others():
    with Ranks(2, _dies_among_buckets) as ranks:
        ranks.wait(60)
        (kind, (name, _), _), died = ranks.outcomes()
    assert (kind, name) == ("raised", "RankError")
    assert died[:2] == ("died", 7)


def _left_alone():
    world = World.of_environment()
    if world.rank == 1:
        os._exit(7)

    def interrupted():
        raise KeyboardInterrupt("first")

    with pytest.raises(KeyboardInterrupt, match="first"):  # it says more than that another rank has gone
        agreed(world, interrupted)
    world.gather(1)


def test_a_rank_that_dies_ends_the_others():
    with Ranks(2, _left_alone) as ranks:
        ranks.wait(60)
        (kind, (name, text), _), died = ranks.outcomes()
    assert (kind, name) == ("raised", "RankError")
    assert "another rank has ended, or has not answered for 3600 s (parallel.rank_timeout)" in text
    assert "'resume RUN'" in text
    assert ".cc" not in text
    assert died[:2] == ("died", 7)


def waited_for():
    """What each rank says while rank 1 keeps the others waiting."""
    watchdog.TICK = watchdog.SHARED_SECONDS = 0.05
    watchdog.LEAST_SECONDS = watchdog.FIRST_SECONDS = 0.4
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    watchdog.log.addHandler(handler)
    world = World.of_environment()
    world.gather(0)
    if world.rank == 1:
        with watchdog.waiting("reward judge", lambda: "sample 41"):
            time.sleep(1.5)
    world.gather(0)
    world.close()
    return said


def test_a_rank_that_waits_says_what_the_other_one_does():
    first, second = on_ranks(2, waited_for)
    assert any("the other ranks: " in text and "rank 1 in reward judge: " in text for text in first), first
    assert any("reward judge: " in text and "sample 41" in text for text in second), second
