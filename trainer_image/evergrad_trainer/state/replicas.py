"""Compares the states that all ranks should hold alike: one 64-bit number a rank, summed from the bits of its
tensors.

A flipped bit changes the number. A rank is named by the majority of those that held the state before; without
a majority all are suspected, because nobody can tell who is right. Where ``shards`` ranks hold one replica
together, each rank is compared with those that hold the same part of the other replicas: every ``shards``-th.
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
    """A signed 64-bit number that depends on every bit of ``state``: the tensors' words, summed and weighed
    by their names.

    Reads each tensor once and allocates next to nothing. Not against anybody who means harm.
    """
    names = sorted(state)
    sums = [sum_words(state[name]) for name in names]
    # One transfer from the device for all tensors.
    numbers = torch.stack(sums).tolist() if sums else []
    return hash_sums(dict(zip(names, numbers, strict=True)))


def hash_sums(sums: Mapping[str, int]) -> int:
    """The number of :func:`hash_state`, from each tensor's own: what :func:`sum_words` makes of it."""
    total = 0
    for name, value in sums.items():
        # An odd number that belongs to the name, the same in every process.
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        total += value * (int.from_bytes(digest, "little") | 1)
    return int((total + 2**63) % 2**64) - 2**63


def find_suspects(
    values: Sequence[int], *, holders: Collection[int] = (), shards: int = 1
) -> tuple[int, ...]:
    """Ranks whose value is wrong.

    The majority of ``holders`` (default: of all) is right; without one every rank is suspected. Both holds
    for each of the ``shards`` parts by itself.
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
    """Compare the states of all replicas after ``step``; ``state``: what this rank holds of its replica.

    ``replicated``: names of tensors that every rank holds, whatever ``shards`` is. All ranks call this.
    Raises DivergedError on all, or PeerLostError.
    """
    parts = {name: tensor for name, tensor in state.items() if name not in replicated}
    for own, copies in (({name: state[name] for name in replicated}, 1), (parts, shards)):
        if not own or world.size == copies:
            # Nobody holds the same.
            continue
        # Collective: one number of each rank, whatever the size of the state.
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
    """Compare each rank that has got a state with its source alone.

    All ranks call this. Raises DivergedError, or PeerLostError.
    """
    # Collective, for all ranks: which of them took part in a transfer does not matter to the exchange.
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
    """Whether all ranks are at the same step, as each has said in an exchange. Raises DivergedError."""
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
    """The sentence that a person reads."""
    # All ranks that hold one part are suspected: no majority of them agrees.
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
    """Sum of the tensor's bits as 64-bit words (wrapping), on its device; what is left at the end counts as
    smaller ones."""
    flat = tensor.detach().contiguous().flatten()
    integers = flat.view(_INTEGERS[flat.element_size()])
    per_word = _WORD_BYTES // flat.element_size()
    # A view as words needs an offset that is a multiple of a word.
    if integers.storage_offset() % per_word:
        integers = integers.clone()
    end = integers.numel() - integers.numel() % per_word
    return integers[:end].view(torch.int64).sum() + integers[end:].sum(dtype=torch.int64)
