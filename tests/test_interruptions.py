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
    yield
    assert {number: signal.signal(number, before[number]) for number in before} == wanted


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_waits_for_the_end_of_the_step_and_a_second_one_does_not(number, error):
    done = []
    with pytest.raises(error):
        for step in range(5):
            with whole_step():
                done.append(step)
                if step == 1:
                    send(number)
                done.append(step)
    assert done == [0, 0, 1, 1]
    with pytest.raises(error), whole_step():
        send(signal.SIGINT)
        done.append("after the first")
        send(number)
        done.append("after the second")
    assert done[4:] == ["after the first"]
    with pytest.raises(ValueError, match="of the step"), whole_step():
        send(number)
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
