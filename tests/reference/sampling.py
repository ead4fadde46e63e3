"""The sampler's truth: docs/sampling.md step by step, with sorting and Python's whole numbers; slow and plain."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from edge_llm.sampling.params import SamplingParams

F32 = np.float32
UNIT = 2**33
LOG2_E = 1 / math.log(2)
LARGEST = float(np.finfo(F32).max)
POLYNOMIAL = (
    0.001326472614891827,
    0.009671512991189957,
    0.05550733581185341,
    0.24022242426872253,
    0.6931470036506653,
    1.0,
)


class InvalidRow(Exception):  # noqa: N818 - an outcome to compare, not a fault
    """The raw logits are no numbers to choose by."""


class NothingAllowed(Exception):  # noqa: N818
    """Bias and mask left no token."""


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Philox4x32-10 over Python integers: four words of counter and two of key give four words."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (y >> 32) ^ b ^ k, y % 2**32, (x >> 32) ^ d ^ m, x % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


def uniform(seed: int, counter: int) -> Fraction:
    """The draw in [0, 1): the first 53 bits of Philox's output."""
    high, low, _, _ = philox((counter % 2**32, counter >> 32, 0, 0), (seed % 2**32, seed >> 32))
    return Fraction((high << 32 | low) >> 11, 2**53)


def adjusted(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """Logits after bias and bans, mask and penalties; `allowed` is bool [vocab]."""
    if np.isnan(logits).any() or (logits == np.inf).any() or (logits == -np.inf).all():
        raise InvalidRow
    values = logits.copy()
    for token, bias in params.logit_bias.items():
        values[token] = bounded(-math.inf if bias <= -100 else float(values[token]) + bias)
    if allowed is not None:
        values[~allowed] = -np.inf
    for token in {*prompt, *generated}:
        value = float(values[token])
        value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        times = list(generated).count(token)
        if times:
            value -= params.presence_penalty + params.frequency_penalty * times
        values[token] = bounded(value)
    if (values == -np.inf).all():
        raise NothingAllowed
    return values


def bounded(value: float) -> np.float32:
    return F32(value if value == -math.inf else min(LARGEST, max(-LARGEST, value)))


def weights(values: np.ndarray, temperature: float) -> list[int]:
    """exp((value - largest) / temperature) in units of 2**-33, by the float32 steps that the kernel is bound to."""
    with np.errstate(over="ignore"):
        power = (values - values.max()) * F32(min(LOG2_E / temperature, LARGEST))
    power = np.maximum(power, F32(-40))
    whole = np.rint(power)
    fraction = np.zeros_like(power)
    for coefficient in POLYNOMIAL:
        fraction = F32(coefficient) + (power - whole) * fraction
    return [int(weight) for weight in np.rint(np.ldexp(fraction, whole.astype(np.int32) + 33))]


def kept(values: np.ndarray, params: SamplingParams) -> dict[int, int]:
    """Weight of each token that top-k, top-p and min-p leave, ids rising."""
    ranked = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    ids = sorted(ranked)
    mass = dict(zip(ids, weights(values[ids], params.temperature), strict=True))
    if params.top_p < 1:
        need, total, nucleus = math.ceil(params.top_p * sum(mass.values())), 0, {}
        for token in sorted(ids, key=lambda token: (-mass[token], token)):
            nucleus[token] = mass[token]
            total += mass[token]
            if total >= need:
                break
        mass = {token: nucleus[token] for token in ids if token in nucleus}
    return {token: weight for token, weight in mass.items() if weight >= params.min_p * UNIT and weight > 0}


def sample(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    allowed: np.ndarray | None = None,
    counter: int = 0,
) -> int:
    """The token; `params` is complete and has a seed. Raises InvalidRow or NothingAllowed."""
    values = adjusted(logits, params, prompt, generated, allowed)
    if params.temperature == 0:
        return int(np.argmax(values))
    mass = kept(values, params)
    target = math.floor(float(uniform(params.seed, counter)) * float(sum(mass.values())))
    for token, weight in mass.items():
        if target < weight:
            return token
        target -= weight
    raise AssertionError("the draw lies beyond the distribution")


def logprobs(logits: np.ndarray) -> np.ndarray:
    """Log-softmax in float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - math.log(np.exp(shifted).sum())


def top_logprobs(logits: np.ndarray, count: int) -> list[tuple[int, float]]:
    """(id, log-probability) of the most probable tokens, lowest id first among equals."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:count]
    exact = logprobs(logits)
    return [(token, float(exact[token])) for token in ranked if logits[token] > -np.inf]


def mask_words(allowed: np.ndarray) -> np.ndarray:
    """bool [vocab] as the kernel's int32 words."""
    bits = np.zeros((len(allowed) + 31) // 32 * 32, np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


class CompiledKernels:
    """The sampling module's entries, compiled; what `warmup.load_kernels` gives, for this module alone."""

    def __init__(self) -> None:
        import numba

        from edge_llm.kernels.sampling import ENTRIES

        self._entries = {
            name: numba.cfunc(signature, error_model="numpy")(function)
            for name, (signature, function) in ENTRIES.items()
        }

    def address(self, name: str) -> int:
        return int(self._entries[name].address)


@functools.cache
def compiled_kernels() -> CompiledKernels:
    """Compiled once for all tests that want them."""
    return CompiledKernels()
