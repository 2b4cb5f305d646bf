"""Signals that end a program wait for the step that is being taken."""

import os
import signal
import threading

import pytest

from matcher.cli.output import messages, stop_signals, whole_step


@pytest.fixture(autouse=True)
def handlers():
    """Those of a command: an exception each."""

    def terminate(*_):
        raise SystemExit(143)

    wanted = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    yield wanted
    assert {number: signal.signal(number, before[number]) for number in before} == wanted


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_waits_for_the_end_of_the_step(number, error):
    done = []
    with pytest.raises(error) as stop:
        for step in range(5):
            with whole_step():
                done.append(step)
                if step == 1:
                    send(number)
                done.append(step)
    assert done == [0, 0, 1, 1]
    if error is SystemExit:
        assert stop.value.code == 143


def test_a_second_signal_does_not_wait():
    done = []
    with pytest.raises(SystemExit), whole_step():
        send(signal.SIGINT)
        done.append("after the first")
        send(signal.SIGTERM)
        done.append("after the second")
    assert done == ["after the first"]


def test_an_error_of_the_step_is_not_hidden():
    with pytest.raises(ValueError, match="of the step"), whole_step():
        send(signal.SIGINT)
        raise ValueError("of the step")


def test_the_first_stops_a_run_and_the_second_ends_it(capfd):
    with pytest.raises(KeyboardInterrupt), messages(), stop_signals() as received:
        send(signal.SIGTERM)
        assert received == [signal.SIGTERM]
        send(signal.SIGINT)
    assert "stopping after this step" in capfd.readouterr().err


def test_threads_that_get_no_signals_take_steps_too():
    done = []

    def work():
        with whole_step(), stop_signals() as received:
            done.append(received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [[]]
