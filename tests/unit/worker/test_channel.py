"""Records between a supervisor and a worker keep their boundaries, order and types; a closed end is
detected."""

import threading

import pytest

from evergrad_common.codec import MAX_TEXT
from evergrad_trainer.worker import channel
from evergrad_trainer.worker.channel import channel_pair

RECORDS = [
    channel.WorkerPlan(3, hard=True),
    channel.WorkerGo(3, 1, 2, "127.0.0.1", 4000, 5.0, cause="node 2 lost"),
    channel.WorkerLeave(4, save=True),
    channel.WorkerFinish(75),
    channel.WorkerPing(),
    channel.WorkerPong(),
    channel.Warm(),
    channel.WorkerReady(3, -1),
    channel.WorkerUp(3, 7),
    channel.WorkerBroken(3, 7, "Connection closed by peer"),
    channel.WorkerLeft(True),
    channel.WorkerResult(3, 12, 0, "complete"),
    channel.Failed(3, 7, 70, "ValueError", "x" * MAX_TEXT, is_final=False, is_agreed=False),
    channel.Observed("step_end", {"loss": 1.5, "nested": {"a": [1, 2]}, "grad_norm": 2.5}),
]


def test_every_record_is_received_as_it_was_sent() -> None:
    ours, theirs = channel_pair()
    for record in RECORDS:
        assert ours.send(record)
    assert [theirs.receive(60.0) for _ in RECORDS] == RECORDS
    assert {type(record) for record in RECORDS} == set(channel.RECORDS)
    ours.close()
    theirs.close()


def test_receive_returns_none_for_silence_and_the_end_after_the_last_record() -> None:
    ours, theirs = channel_pair()
    assert theirs.receive(0.0) is None
    ours.send(channel.Warm())
    ours.close()
    assert theirs.receive(60.0) == channel.Warm()
    with pytest.raises(EOFError):
        theirs.receive(60.0)
    assert not theirs.send(channel.WorkerPong())
    theirs.close()


def test_an_end_that_does_not_read_loses_observations_and_blocks_no_sender() -> None:
    ours, theirs = channel_pair()
    for number in range(20_000):
        ours.observe("step_end", {"number": number})
    first = theirs.receive(60.0)
    assert first == channel.Observed("step_end", {"number": 0})
    ours.close()
    theirs.close()


def test_two_sending_threads_do_not_mix_their_records() -> None:
    ours, theirs = channel_pair()
    threads = [
        threading.Thread(target=lambda kind=kind: [ours.send(kind) for _ in range(200)])
        for kind in (channel.WorkerPing(), channel.WorkerPong())
    ]
    for thread in threads:
        thread.start()
    received = [theirs.receive(60.0) for _ in range(400)]
    for thread in threads:
        thread.join()
    assert (
        received.count(channel.WorkerPing()) == received.count(channel.WorkerPong()) == 200
    )
    ours.close()
    theirs.close()


def test_a_text_is_shortened_and_half_characters_are_replaced_before_sending() -> None:
    ours, theirs = channel_pair()
    text = channel.fit_text("no such file: docs-\udcff.jsonl" + "x" * 5000)
    assert len(text) == MAX_TEXT and text.startswith("no such file: docs-?.jsonl")
    record = channel.WorkerBroken(3, 7, text)
    assert ours.send(record) and theirs.receive(60.0) == record
    ours.close()
    theirs.close()


def test_an_observation_with_a_non_finite_loss_is_received() -> None:
    ours, theirs = channel_pair()
    ours.observe("step_end", {"loss": float("nan"), "metrics": {"kl": float("-inf")}})
    record = theirs.receive(60.0)
    assert (
        isinstance(record, channel.Observed)
        and str(record.record) == "{'loss': nan, 'metrics': {'kl': -inf}}"
    )
    ours.close()
    theirs.close()
