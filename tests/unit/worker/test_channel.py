"""Records between a supervisor and a worker keep their borders, their order and their types; an end that is
gone is told."""

import threading

import pytest

from evergrad_common.codec import MAX_TEXT
from evergrad_trainer.worker import channel as say
from evergrad_trainer.worker.channel import channel_pair

RECORDS = [
    say.Plan(3, hard=True),
    say.Go(3, 1, 2, "127.0.0.1", 4000, 5.0, cause="node 2 lost"),
    say.Leave(4, save=True),
    say.End(75),
    say.Ping(),
    say.Pong(),
    say.Warm(),
    say.Ready(3, -1),
    say.Up(3, 7),
    say.Broken(3, 7, "Connection closed by peer"),
    say.Left(True),
    say.Result(3, 12, 0, "complete"),
    say.Failed(3, 7, 70, "ValueError", "x" * MAX_TEXT, is_final=False, is_agreed=False),
    say.Observed("step_end", {"loss": 1.5, "nested": {"a": [1, 2]}, "grad_norm": 2.5}),
]


def test_every_record_arrives_as_it_was_sent() -> None:
    ours, theirs = channel_pair()
    for record in RECORDS:
        assert ours.send(record)
    assert [theirs.receive(60.0) for _ in RECORDS] == RECORDS
    assert {type(record) for record in RECORDS} == set(say.RECORDS)
    ours.close()
    theirs.close()


def test_silence_is_none_and_a_closed_end_is_told_after_its_last_words() -> None:
    ours, theirs = channel_pair()
    assert theirs.receive(0.0) is None
    ours.send(say.Warm())
    ours.close()
    assert theirs.receive(60.0) == say.Warm()
    with pytest.raises(EOFError):
        theirs.receive(60.0)
    assert not theirs.send(say.Pong())
    theirs.close()


def test_an_end_that_does_not_read_loses_observations_and_holds_nobody() -> None:
    ours, theirs = channel_pair()
    for number in range(20_000):
        ours.observe("step_end", {"number": number})
    first = theirs.receive(60.0)
    assert first == say.Observed("step_end", {"number": 0})
    ours.close()
    theirs.close()


def test_two_threads_that_send_do_not_mix_their_records() -> None:
    ours, theirs = channel_pair()
    threads = [
        threading.Thread(target=lambda kind=kind: [ours.send(kind) for _ in range(200)])
        for kind in (say.Ping(), say.Pong())
    ]
    for thread in threads:
        thread.start()
    received = [theirs.receive(60.0) for _ in range(400)]
    for thread in threads:
        thread.join()
    assert received.count(say.Ping()) == received.count(say.Pong()) == 200
    ours.close()
    theirs.close()


def test_a_text_is_cut_and_half_characters_are_replaced_before_they_are_sent() -> None:
    ours, theirs = channel_pair()
    text = say.fit_text("no such file: docs-\udcff.jsonl" + "x" * 5000)
    assert len(text) == MAX_TEXT and text.startswith("no such file: docs-?.jsonl")
    record = say.Broken(3, 7, text)
    assert ours.send(record) and theirs.receive(60.0) == record
    ours.close()
    theirs.close()


def test_an_observation_with_a_loss_that_is_no_number_arrives() -> None:
    ours, theirs = channel_pair()
    ours.observe("step_end", {"loss": float("nan"), "metrics": {"kl": float("-inf")}})
    record = theirs.receive(60.0)
    assert (
        isinstance(record, say.Observed)
        and str(record.record) == "{'loss': nan, 'metrics': {'kl': -inf}}"
    )
    ours.close()
    theirs.close()
