"""Saves in the background: what is saved, what a failure does, what happens while one is under way.

    python examples/asynchronous.py

One of its saves fails, for want of room that this example makes up.
"""

from __future__ import annotations

import errno
import tempfile
import threading

import torch

import torch_dcpx as dcpx

DEADLINE_S = 60.0


def train_while_saving(folder: str) -> None:
    """What was there at the call is what is saved."""
    state = {"weights": torch.zeros(1000), "step": 1}
    handle = dcpx.async_save(state, f"{folder}/step-1")
    state["weights"] += 1  # training goes on, on the same tensors
    report = handle.result()  # committed and durable on every rank, or raised on every rank
    print(f"saved {report.checkpoint_id.rsplit('/', 1)[1]} with {report.ranks} rank")
    dcpx.load(state, f"{folder}/step-1")
    print(f"loaded the weights of the call: {state['weights'].unique().tolist()}")


def fail_in_the_background(folder: str) -> None:
    """An error that nobody asks for is raised by the next save."""

    def no_space(_done: int, _total: int) -> None:
        raise OSError(errno.ENOSPC, "no space left, says this example")

    state = {"weights": torch.ones(1000), "step": 2}
    failing = dcpx.WriteOptions(progress=no_space)
    dcpx.async_save(state, f"{folder}/step-2", options=failing)  # the handle is dropped
    try:
        dcpx.save(state, f"{folder}/step-3")
    except OSError as error:
        print(f"the next save raised: {error.strerror}")
    try:
        dcpx.load(state, f"{folder}/step-2")
    except dcpx.NotCommittedError:
        print("what failed was never a checkpoint: NotCommittedError")
    dcpx.save(state, f"{folder}/step-3")  # told once, it is in nobody's way
    print("and the save after that went well")


def save_while_busy(folder: str) -> None:
    """`on_busy` says what a save does that finds another one under way."""
    go_on = threading.Event()

    def slow(_done: int, _total: int) -> None:
        go_on.wait(DEADLINE_S)

    state = {"weights": torch.ones(1000)}
    first = dcpx.async_save(state, f"{folder}/slow", options=dcpx.WriteOptions(progress=slow))
    try:
        skip, error = dcpx.WriteOptions(on_busy="skip"), dcpx.WriteOptions(on_busy="error")
        skipped = dcpx.async_save(state, f"{folder}/skipped", options=skip)
        print(f"on_busy='skip': the result is {skipped.result()}")
        try:
            dcpx.async_save(state, f"{folder}/refused", options=error)
        except dcpx.ConcurrentSaveError:
            print("on_busy='error': ConcurrentSaveError")
    finally:
        go_on.set()
    with dcpx.async_save(state, f"{folder}/waited"):  # on_busy="wait": the default
        print(f"on_busy='wait': the first one has ended: {first.done()}")


def main(folder: str) -> None:
    train_while_saving(folder)
    fail_in_the_background(folder)
    save_while_busy(folder)
    dcpx.close()  # waits for what is under way, gives the memory of the copies back


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
