"""The part of the rendezvous that runs on the agent's main thread."""

from pathlib import Path

from evergrad_common.contract import ExitCode
from evergrad_coordinator.protocol import Done, Go, Left, Placement, Plan, Ready, Up
from evergrad_trainer.torchrun.agent_loop import AgentLoop
from evergrad_trainer.torchrun.agent_state import AgentSettings, AgentState
from evergrad_trainer.torchrun.agent_workers import say

_END_SECONDS = 0.5
_DEPART_SECONDS = 1.0
"""Time to wait for the plan that follows a leave; much longer than the coordinator waits for other events."""


class AgentLink:
    """Connects the agent's thread to the loop's thread: it reads and waits on ``state``, and sends messages
    through ``loop``."""

    def __init__(self, settings: AgentSettings, *, directory: Path) -> None:
        self.settings = settings
        self.state = AgentState(settings.lease_seconds)
        self.loop = AgentLoop(settings, self.state, directory=directory)

    def depart(self) -> None:
        """Leave the coordinator when the agent ends, after its workers have exited.

        An agent that was asked to leave reports it, because the coordinator would otherwise treat the node as
        lost.
        """
        with self.state.changed:
            place = self.state.place
            if (
                self.state.is_leaving
                and self.state.end is None
                and place is not None
                and not self.state.done_generation
            ):
                # Wait for the next plan and answer it, because the other nodes wait for this answer.
                self.state.is_out = True
                self.loop.call(self.loop.members.say_ready_to_leave)
                self.state.changed.wait_for(
                    lambda: (
                        self.state.end or self.state.answered_generation > place.generation
                    ),
                    _DEPART_SECONDS,
                )
                self.loop.send(Left(self.state.newest, is_saved=False))
        self.loop.close()

    def should_restart_workers(self) -> bool:
        """Whether the workers must be stopped: another group is planned, the run has ended, or the lease is
        lost."""
        with self.state.changed:
            place = self.state.place
            if place is None:
                return True
            # torch calls this only while its workers run, so the first call shows that the workers are up.
            if self.state.up_generation < place.generation:
                self.state.up_generation = place.generation
                self.loop.send(Up(place.generation, self.loop.members.reports.step))
            has_lost = self.loop.seconds_since_contact() > self.state.lease_seconds
            if has_lost:
                say(
                    f"no contact with the coordinator for {self.state.lease_seconds:g} s: "
                    "stopping the workers"
                )
            self.state.is_stopping_workers = (
                has_lost
                or self.state.end is not None
                or (self.state.newest > place.generation and not self.loop.drains())
            )
            return self.state.is_stopping_workers

    def leave_group(self) -> None:
        """Leave the group after the workers have exited. If no stop was requested, reports the failure of
        their generation."""
        with self.state.changed:
            place = self.state.place
            if (
                place is not None
                and not self.state.is_stopping_workers
                and self.state.newest <= place.generation
                and self.state.end is None
            ):
                # On a busy machine the agent may notice the exit before the watch, which records the rank.
                self.state.changed.wait_for(
                    lambda: self.state.first_end is not None,
                    _END_SECONDS if self.loop.members.watch is not None else 0,
                )
                self.loop.members.send_broken(place)
            # Leave the group in every case: this node answers later plans as a node without workers.
            self.state.place = self.state.go = None
            self.state.is_stopping_workers = False

    def answer(self, plan: Plan, *, port: int) -> None:
        """Report that this node's old workers have exited, and the port of the store for ``plan``."""
        self.state.answered_generation = plan.generation
        self.loop.send(Ready(plan.generation, workers=1, port=port))

    def take_place(self, go: Go) -> None:
        """Take this node's place in the group of ``go``. The agent starts the workers next."""
        self.state.place = Placement(
            go.generation,
            first_rank=go.first_rank,
            workers=go.workers,
            world_size=go.world_size,
        )
        self.state.go = self.state.plan = self.state.first_end = None
        self.loop.members.reports.begin(go.generation)
        self.loop.call(self.loop.members.begin_watch, go.port)

    def vote_done(self) -> None:
        """Report that all workers of this node have exited successfully.

        Raises SystemExit(75) if they exited because they were asked to stop.
        """
        with self.state.changed:
            if self.state.place is None:
                return
            if self.loop.node_state.has_stopped(self.state.place.generation):
                # If it counted as done, the run would end unfinished. With exit code 75 the node returns and
                # continues.
                say(
                    "the script stopped as asked but ended with exit code 0; end it with 75, so "
                    "that only its workers start anew"
                )
                raise SystemExit(int(ExitCode.STOPPED_SAVED))
            self.state.done_generation = self.state.place.generation
            # Workers that exit before torch's first call of ``should_restart_workers`` were up too.
            if self.state.up_generation < self.state.place.generation:
                self.loop.send(
                    Up(self.state.place.generation, self.loop.members.reports.step)
                )
            self.loop.call(self.loop.members.flush_report)
            self.loop.send(Done(self.state.done_generation))
            if self.state.plan is not None:
                # This node is done, but a plan may wait for the report that its workers have exited.
                self.loop.send(Ready(self.state.plan.generation, workers=0, port=0))

    def report_failure(self) -> None:
        """Report a failure after which the agent ends, because its restarts are used up."""
        with self.state.changed:
            if (
                self.state.place is not None
                and self.state.first_end is not None
                and self.state.end is None
            ):
                self.loop.members.send_broken(self.state.place)
