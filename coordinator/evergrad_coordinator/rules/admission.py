"""Checks whether a node may join: token, version, run, values and fingerprint of its hello. Pure."""

from evergrad_common.contract import ExitCode
from evergrad_common.secret import is_token
from evergrad_coordinator.protocol import (
    MAX_GENERATION,
    MAX_WORKERS,
    PROTOCOL_VERSION,
    Hello,
    Refused,
)
from evergrad_coordinator.rules.state import GroupSettings

MAX_NAME = 63
MAX_ADDRESS = 255


def refuse(
    hello: Hello, settings: GroupSettings, *, fingerprint: dict[str, str] | None
) -> Refused | None:
    """Return the refusal of a node that cannot join, or None if it can.

    ``fingerprint``: fingerprint of the group's first member, or None.
    """
    # Check the token first, because the other refusals contain values of the group. A client without the
    # token must not receive them.
    if not is_token(hello.token, settings.token):
        return _build(
            "WrongToken",
            "hello.token: not the token of this run. Give the node the token file of its coordinator.",
        )

    # Check the version next, because in another version the fields may have another meaning.
    if hello.protocol != PROTOCOL_VERSION:
        text = (
            f"hello.protocol: {hello.protocol}; this coordinator speaks {PROTOCOL_VERSION}. Use one "
            "Evergrad in all pods."
        )
        return _build("ProtocolVersion", text)
    if hello.run != settings.run:
        text = (
            f"hello.run: {hello.run[:MAX_ADDRESS]}; this coordinator serves {settings.run}. Correct "
            "the address or the name."
        )
        return _build("WrongRun", text)
    if (wrong := _find_wrong_value(hello)) is not None:
        return _build("WrongValue", wrong)
    if hello.recovery != settings.recovery:
        text = (
            f"hello.recovery: {hello.recovery}; the group's is {settings.recovery}. Start all nodes of a "
            "run with one manifest."
        )
        return _build("RecoveryDiffers", text)

    # The first member decides. A node with another fingerprint would train another run or produce different
    # results.
    mine = hello.fingerprint
    group = mine if fingerprint is None else fingerprint
    for key in sorted(mine.keys() | group.keys()):
        if mine.get(key) != group.get(key):
            ours, theirs = (
                str(one.get(key, "nothing"))[:MAX_ADDRESS] for one in (mine, group)
            )
            text = (
                f"hello.fingerprint.{key[:MAX_NAME]}: {ours}; the group's first member has {theirs}. "
                "All nodes need the same."
            )
            return _build("FingerprintDiffers", text)
    return None


def refuse_crowd(settings: GroupSettings) -> Refused:
    """Build the refusal of a node that exceeds ``max_members``."""
    return _build(
        "TooManyMembers",
        f"hello: the group has {settings.max_members} nodes, spares included. Start fewer.",
    )


def _build(reason: str, message: str) -> Refused:
    # Never use exit code 64, which could end the run. A refusal concerns only this host, image or time.
    return Refused(reason=reason, message=message, exit_code=ExitCode.INTERNAL)


def _find_wrong_value(hello: Hello) -> str | None:
    """Describe the first value that is out of bounds, or return None if all values are valid."""
    generations = [hello.known_generation, *([hello.had.generation] if hello.had else [])]
    checks = [
        (
            "node",
            hello.node,
            0 < len(hello.node) <= MAX_NAME and hello.node.isprintable(),
            f"1 to {MAX_NAME} characters",
        ),
        (
            "incarnation",
            "…",
            0 < len(hello.incarnation) <= MAX_NAME,
            f"1 to {MAX_NAME} characters",
        ),
        (
            "address",
            "…",
            0 < len(hello.address) <= MAX_ADDRESS,
            f"1 to {MAX_ADDRESS} characters",
        ),
        (
            "workers",
            str(hello.workers),
            0 <= hello.workers <= MAX_WORKERS,
            f"0 to {MAX_WORKERS}",
        ),
        (
            "generation",
            "…",
            all(0 <= one < MAX_GENERATION for one in generations),
            f"0 to {MAX_GENERATION}",
        ),
    ]
    for name, shown, is_right, wanted in checks:
        if not is_right:
            return f"hello.{name}: {shown[:MAX_NAME]} is not allowed; it must be {wanted}. Correct the node."
    return None
