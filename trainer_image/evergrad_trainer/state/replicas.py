"""Compares the states of replicas, which should be equal, by one 64-bit hash per rank.

A flipped bit in a tensor changes the hash. The majority of the ranks that held the state before determines
the correct hash. Without a majority, all ranks are suspected, because the correct state is unknown. If
``shards`` ranks hold one replica together, each rank is compared with the ranks that hold the same shard of
the other replicas: every ``shards``-th rank.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch

from evergrad_trainer.base.errors import DivergedError
from evergrad_trainer.distributed.world import World
from evergrad_trainer.state.transfer import StateTransfer

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD_BYTES = 8


def hash_state(state: Mapping[str, torch.Tensor]) -> int:
    """Return a signed 64-bit hash that depends on every bit of ``state``.

    The hash is the sum of all 64-bit words of the tensors, with a weight for each tensor name. Each tensor is
    read once and almost no memory is allocated. The hash is not secure against deliberate manipulation.
    """
    names = sorted(state)
    sums = [sum_words(state[name]) for name in names]
    # One transfer from the device for all tensors.
    numbers = torch.stack(sums).tolist() if sums else []
    return hash_sums(dict(zip(names, numbers, strict=True)))


def hash_sums(sums: Mapping[str, int]) -> int:
    """Return the hash of :func:`hash_state` from the result of :func:`sum_words` for each tensor name."""
    total = 0
    for name, value in sums.items():
        # The weight is an odd number that depends only on the name, so it is equal in every process.
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        total += value * (int.from_bytes(digest, "little") | 1)
    return int((total + 2**63) % 2**64) - 2**63


def find_suspects(
    values: Sequence[int], *, holders: Collection[int] = (), shards: int = 1
) -> tuple[int, ...]:
    """Return the ranks whose value is wrong.

    The majority of ``holders`` (by default, of all ranks) determines the correct value. Without a majority,
    every rank is suspected. Each of the ``shards`` parts is evaluated separately. For example,
    ``find_suspects([7, 7, 8])`` returns ``(2,)``.
    """
    suspects: list[int] = []
    for part in range(shards):
        ranks = range(part, len(values), shards)
        if len({values[rank] for rank in ranks}) == 1:
            continue
        voters = [rank for rank in ranks if rank in holders] or list(ranks)
        value, votes = Counter(values[rank] for rank in voters).most_common(1)[0]
        has_majority = 2 * votes > len(voters)
        suspects += [rank for rank in ranks if not has_majority or values[rank] != value]
    return tuple(sorted(suspects))


def compare_states(
    state: Mapping[str, torch.Tensor],
    world: World,
    *,
    step: int,
    holders: Collection[int] = (),
    shards: int = 1,
    replicated: Collection[str] = (),
) -> None:
    """Compare the states of all replicas after ``step``. All ranks call this.

    ``state`` contains the tensors that this rank holds of its replica. ``replicated`` are the names of the
    tensors that every rank holds, whatever ``shards`` is. Raises DivergedError on all ranks if the states
    differ, or PeerLostError.
    """
    parts = {name: tensor for name, tensor in state.items() if name not in replicated}
    for own, copies in (({name: state[name] for name in replicated}, 1), (parts, shards)):
        if not own or world.size == copies:
            # No other rank holds the same tensors.
            continue
        # Collective: one number from each rank, whatever the size of the state.
        hashes = world.gather_integers(hash_state(own))
        suspects = find_suspects(hashes, holders=holders, shards=copies)
        if suspects:
            what = f"the state after step {step}"
            raise DivergedError(
                describe_difference(suspects, size=world.size, what=what, shards=copies),
                suspects,
            )


def compare_transferred(
    state: Mapping[str, torch.Tensor], world: World, transfers: Sequence[StateTransfer]
) -> None:
    """Compare each rank that has received a state with the source of the transfer. All ranks call this.

    Raises DivergedError on all ranks if the states differ, or PeerLostError.
    """
    # Collective of all ranks, including the ranks that took no part in a transfer.
    hashes = world.gather_integers(hash_state(state))
    suspects = tuple(
        one.stale_rank for one in transfers if hashes[one.stale_rank] != hashes[one.source]
    )
    if suspects:
        raise DivergedError(
            describe_difference(
                suspects, size=world.size, what="the state that was transferred to it"
            ),
            suspects,
        )


def compare_steps(steps: Sequence[int]) -> None:
    """Check that all ranks are at the same step. ``steps`` are the steps that the ranks have exchanged.

    Raises DivergedError if the steps differ.
    """
    suspects = find_suspects(steps)
    if suspects:
        named = ", ".join(f"rank {rank}: {step}" for rank, step in enumerate(steps))
        what = f"the number of the step ({named})"
        raise DivergedError(
            describe_difference(suspects, size=len(steps), what=what), suspects
        )


def describe_difference(
    suspects: Sequence[int], *, size: int, what: str, shards: int = 1
) -> str:
    """Return the error message for ``suspects``. ``what`` names the compared value."""
    # If all ranks that hold one part are suspected, no majority of them agrees.
    undecided = [
        rank
        for rank in suspects
        if set(range(rank % shards, size, shards)) <= set(suspects)
    ]
    if undecided:
        who = "no majority of ranks agrees"
        if len(undecided) == 2:
            one, other = undecided
            who = f"one of ranks {one} and {other} is wrong, and two cannot tell which"
        return f"replicas: {what} differs between ranks; {who}. Training goes back to the newest checkpoint."
    ranks = ", ".join(map(str, suspects))
    who = (
        f"that of rank {ranks} is wrong"
        if len(suspects) == 1
        else f"those of ranks {ranks} are wrong"
    )
    why = "memory or a device of its host may be faulty"
    return (
        f"replicas: {what} differs between ranks; by majority {who}: {why}. Look at that host if "
        "this comes again."
    )


def sum_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the tensor's 64-bit words modulo 2**64, on its device.

    The elements after the last whole word are added as single integers of their own size.
    """
    flat = tensor.detach().contiguous().flatten()
    integers = flat.view(_INTEGERS[flat.element_size()])
    per_word = _WORD_BYTES // flat.element_size()
    # The offset of a view as 64-bit words must be a multiple of the word size.
    if integers.storage_offset() % per_word:
        integers = integers.clone()
    end = integers.numel() - integers.numel() % per_word
    return integers[:end].view(torch.int64).sum() + integers[end:].sum(dtype=torch.int64)
