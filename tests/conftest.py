"""Where no GPU is, Triton kernels run in the interpreter, and the tests that need a GPU are collected and skipped."""

import os
import signal

import pytest
import torch

# A shell's background job ignores SIGINT, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HAS_GPU = torch.cuda.is_available()

# NOTE: read by triton when it is first imported; neither this file nor torch imports it before.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
