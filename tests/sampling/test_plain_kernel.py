"""The sampling kernel without compiled code: the same tokens as the slow truth, and so as the compiled kernel."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_llm.errors import KernelError
from edge_llm.kernels.layout import SampleCall, SampleStatus
from edge_llm.sampling.plain_kernel import PlainKernels
from tests.kernels.test_sampling import Call, check, random_case

KERNELS = PlainKernels()


@settings(max_examples=700)
@given(st.integers(0, 2**32), st.one_of(st.integers(1, 70), st.integers(1, 400)), st.integers(0, 6))
def test_equals_the_reference(seed: int, size: int, kind: int) -> None:
    case = random_case(seed, size, kind)
    call = Call(*case)
    before = case[0].tobytes()
    check(call, call.status(KERNELS), case)
    assert case[0].tobytes() == before


@pytest.mark.parametrize("kind", range(7))
def test_equals_the_reference_at_full_size(kind: int) -> None:
    case = random_case(500 + kind, 49_152, kind)
    call = Call(*case)
    check(call, call.status(KERNELS), case)


def test_a_long_repeat_is_measured_in_one_pass() -> None:
    case = (np.zeros(8, np.float32), random_case(1, 8, 0)[1].with_options(dry_multiplier=1.0), [3] * 8192)
    call = Call(*case)
    assert call.status(KERNELS) == SampleStatus.OK


def test_what_is_impossible_is_refused_and_raises_nothing() -> None:
    call = Call(np.zeros(4, np.float32))
    call.record[SampleCall.BIASES] = 1
    call.bias_ids = np.array([9], np.int32)
    call.record[SampleCall.BIAS_IDS] = call.bias_ids.ctypes.data
    call.bias_values = np.ones(1)
    call.record[SampleCall.BIAS_VALUES] = call.bias_values.ctypes.data
    assert call.status(KERNELS) == SampleStatus.BAD_CALL
    with pytest.raises(KernelError):
        KERNELS.address("linear")
