"""The sampling kernel without compiled code: for machines on which none can be had. docs/sampling.md says what each stage does.

The same arithmetic as `kernels.sampling`, on whole arrays, so the same seed gives the same token.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from edge_llm.errors import KernelError
from edge_llm.kernels.layout import CALL_FIELDS, SampleCall, SampleStatus

_F32 = np.float32
_UNIT = 2.0**33
_LARGEST = float(np.finfo(np.float32).max)
_LEAST_POWER = _F32(-40)
_SERIES = (
    0.001326472614891827,
    0.009671512991189957,
    0.05550733581185341,
    0.24022242426872253,
    0.6931470036506653,
    1.0,
)
"""2**f by powers of f, the highest first; those of kernels.weights"""
_MOST_DRY_PENALTY = 128.0

_Address = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


class PlainKernels:
    """Where a Sampler finds `sample_row`, as in a library of compiled kernels."""

    def address(self, name: str) -> int:
        """Address of the C function `name`; raises `KernelError` for any other than sample_row."""
        if name != "sample_row":
            raise KernelError(f"no kernel is called {name!r}")
        return ctypes.cast(_FUNCTION, ctypes.c_void_p).value or 0


def _sample_row(address: int) -> int:
    try:
        return int(_Row(address).sample())
    except Exception:  # nobody hears of one that leaves a callback
        return SampleStatus.BAD_CALL


_FUNCTION = _Address(_sample_row)
"""lives as long as the process, for whoever has its address may call"""


def _array(address: int, count: int, kind: Any) -> np.ndarray:
    if not count:
        return np.zeros(0, kind)
    return np.frombuffer((ctypes.c_uint8 * (count * np.dtype(kind).itemsize)).from_address(address), kind)


class _Row:
    """One row of logits and what is asked of it."""

    def __init__(self, address: int) -> None:
        self.call = _array(address, CALL_FIELDS, np.int64)
        self.real = self.call.view(np.float64)
        self.logits = self.view(SampleCall.LOGITS, SampleCall.VOCAB, _F32)

    def view(self, field: SampleCall, count: SampleCall, kind: Any) -> np.ndarray:
        return _array(int(self.call[field]), int(self.call[count]), kind)

    def sample(self) -> SampleStatus:
        logits = self.logits
        top = logits.max()
        if not np.isfinite(top):
            return SampleStatus.INVALID_ROW
        if self.call[SampleCall.LOGPROBS]:
            self.report(top)
        values = self.edited()
        if values.max() == -np.inf:
            return SampleStatus.NOTHING_ALLOWED
        self.call[SampleCall.TOKEN] = self.choose(values)
        return SampleStatus.OK

    def report(self, top: np.float32) -> None:
        alternatives = self.view(SampleCall.ALTERNATIVE_IDS, SampleCall.ALTERNATIVES, np.int32)
        ids = _largest(self.logits, len(alternatives))
        ids = ids[np.argsort(-self.logits[ids], kind="stable")]
        ids = ids[self.logits[ids] > -np.inf]
        alternatives[: len(ids)] = ids
        self.call[SampleCall.LISTED] = len(ids)
        self.real[SampleCall.MAXIMUM] = top
        self.real[SampleCall.TOTAL] = _weights(_powers(self.logits, top, 1.0)).sum() / _UNIT

    # --- what changes logits ---

    def edited(self) -> np.ndarray:
        """A copy after mask, bias and bans, and penalties."""
        call, real, values = self.call, self.real, self.logits.copy()
        if call[SampleCall.MASK]:
            words = _array(int(call[SampleCall.MASK]), (len(values) + 31) // 32, np.int32)
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(values)]
            values[allowed == 0] = -np.inf
        ids = self.view(SampleCall.BIAS_IDS, SampleCall.BIASES, np.int32)
        biases = self.view(SampleCall.BIAS_VALUES, SampleCall.BIASES, np.float64)
        values[ids] = _bounded(np.where(biases <= -100, -np.inf, values[ids].astype(np.float64) + biases))
        ids = self.view(SampleCall.HISTORY_IDS, SampleCall.HISTORY, np.int32)
        counts = self.view(SampleCall.HISTORY_COUNTS, SampleCall.HISTORY, np.int32)
        seen, repetition = values[ids].astype(np.float64), real[SampleCall.REPETITION]
        seen = np.where(seen > 0, seen / repetition, seen * repetition)
        loss = real[SampleCall.PRESENCE] + real[SampleCall.FREQUENCY] * counts
        values[ids] = _bounded(np.where(counts > 0, seen - loss, seen))
        for token, penalty in self.repeat_penalties().items():
            values[token] = _bounded(np.float64(values[token]) - penalty)
        return values

    def repeat_penalties(self) -> dict[int, float]:
        """DRY: what each token that would lengthen a repeat loses."""
        window = self.view(SampleCall.DRY_TOKENS, SampleCall.DRY_WINDOW, np.int32).tolist()
        limit, allowed = int(self.call[SampleCall.DRY_LIMIT]), int(self.call[SampleCall.DRY_ALLOWED])
        longest: dict[int, int] = {}
        backwards = window[::-1]
        for back, length in enumerate(_common_beginnings(backwards)):
            if back and min(length, limit) >= allowed and backwards[back - 1] >= 0:
                follower = backwards[back - 1]
                longest[follower] = max(min(length, limit), longest.get(follower, 0))
        multiplier, base = (float(self.real[field]) for field in (SampleCall.DRY_MULTIPLIER, SampleCall.DRY_BASE))
        return {
            token: min(multiplier * _power(base, length - allowed), _MOST_DRY_PENALTY)
            for token, length in longest.items()
        }

    # --- what chooses ---

    def choose(self, values: np.ndarray) -> int:
        call, real, top = self.call, self.real, values.max()
        temperature, k = float(real[SampleCall.TEMPERATURE]), int(call[SampleCall.TOP_K])
        if temperature == 0:
            return int(values.argmax())
        mirostat = bool(call[SampleCall.MIROSTAT])
        ids = _largest(values, k) if 0 < k < len(values) and not mirostat else np.arange(len(values))
        power = _powers(values[ids], top, temperature)
        mass = _weights(power)
        if real[SampleCall.TOP_N_SIGMA] > 0:
            mass[values[ids] < _sigma_floor(values, float(real[SampleCall.TOP_N_SIGMA]))] = 0
        draw, coin = _uniforms(int(call.view(np.uint64)[SampleCall.SEED]), int(call[SampleCall.COUNTER]))
        total = mass.sum()
        kept = self.kept_by_mirostat(mass) if mirostat else self.kept_by_filters(mass, power, coin)
        ends = np.cumsum(kept)
        index = int(np.searchsorted(ends, math.floor(draw * float(ends[-1])), side="right"))
        if mirostat:
            real[SampleCall.SURPRISE] = math.log2(total / mass[index])
        return int(ids[index])

    def kept_by_mirostat(self, mass: np.ndarray) -> np.ndarray:
        mu = _F32(-self.real[SampleCall.MIROSTAT_MU])
        share = _weights(np.array([max(_LEAST_POWER, min(mu, _F32(0)))], _F32))[0]
        least = min(_UNIT, math.ceil(share / _UNIT * float(mass.sum())))
        return np.where(mass >= max(1.0, least), mass, 0.0)

    def kept_by_filters(self, mass: np.ndarray, power: np.ndarray, coin: float) -> np.ndarray:
        """The weights of what typical, top-p, min-p and XTC leave; 0 for the others."""
        real = self.real
        if real[SampleCall.TYPICAL_P] < 1:
            mass = _typical(mass, power, float(real[SampleCall.TYPICAL_P]))
        heaviest = mass.max()
        if real[SampleCall.TOP_P] < 1:
            order = np.argsort(-mass, kind="stable")
            need = math.ceil(float(real[SampleCall.TOP_P]) * float(mass.sum()))
            last = int(np.searchsorted(np.cumsum(mass[order]), need))
            mass = _only(mass, order[: last + 1])
        mass = np.where(mass >= real[SampleCall.MIN_P] * heaviest, mass, 0.0)
        if coin < real[SampleCall.XTC_PROBABILITY]:
            order = np.argsort(-mass, kind="stable")
            least = float(real[SampleCall.XTC_THRESHOLD]) * float(mass.sum())
            top = order[(mass[order] >= least) & (mass[order] > 0)]
            mass = mass.copy()
            mass[top[:-1]] = 0
        return mass


def _only(mass: np.ndarray, places: np.ndarray) -> np.ndarray:
    kept = np.zeros_like(mass)
    kept[places] = mass[places]
    return kept


def _bounded(values: np.ndarray | np.float64) -> np.ndarray:
    clipped = np.where(values == -np.inf, -np.inf, np.clip(values, -_LARGEST, _LARGEST))
    bounded: np.ndarray = clipped.astype(_F32)
    return bounded


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Rising ids of the `count` largest values, of equal ones the first."""
    if count >= len(values):
        return np.arange(len(values))
    if not count:
        return np.zeros(0, np.int64)
    edge = np.partition(values, len(values) - count)[len(values) - count]
    above, equal = np.flatnonzero(values > edge), np.flatnonzero(values == edge)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))


def _powers(values: np.ndarray, top: np.float32, temperature: float) -> np.ndarray:
    """float32 log2 of exp((values - top) / temperature), at least -40."""
    slope = _F32(min(math.log2(math.e) / temperature, _LARGEST))
    with np.errstate(over="ignore"):
        powers: np.ndarray = np.maximum((values - top) * slope, _LEAST_POWER)
    return powers


def _weights(power: np.ndarray) -> np.ndarray:
    """float64 2**power in units of 2**-33: whole numbers whose sums are exact in any order."""
    whole = np.rint(power)
    rest, fraction = power - whole, np.zeros_like(power)
    for coefficient in _SERIES:
        fraction = _F32(coefficient) + rest * fraction
    weights: np.ndarray = np.rint(np.ldexp(fraction, whole.astype(np.int32) + 33)).astype(np.float64)
    return weights


def _typical(mass: np.ndarray, power: np.ndarray, share: float) -> np.ndarray:
    """The tokens whose depth, in steps of 2**-20 bits, is nearest to the mean depth."""
    depths = np.rint(power * _F32(-(2**20)))
    products = np.rint(mass.astype(_F32) * depths / _F32(2**20)).astype(np.float64)
    mean = round(float(products.sum()) * 2.0**20 / float(mass.sum()))
    distance = np.abs(depths.astype(np.float64) - mean)
    alive = np.flatnonzero(mass)
    order = alive[np.argsort(distance[alive], kind="stable")]
    need = max(1, math.ceil(share * float(mass.sum())))
    last = min(int(np.searchsorted(np.cumsum(mass[order]), need)), len(order) - 1)
    return np.where(distance <= distance[order[last]], mass, 0.0)


def _sigma_floor(values: np.ndarray, sigmas: float) -> np.float32:
    """Top-n-sigma's lowest value that stays; the deviation is that of whole steps of 2**-21 of the range."""
    finite = values[values > -np.inf] * _F32(0.5)
    depths = finite.max() - finite
    if depths.max() == 0:
        return _F32(values.max())
    with np.errstate(over="ignore"):
        scale = min(_F32(2**21) / depths.max(), _F32(_LARGEST))
    steps = np.rint(depths * scale).astype(np.int64)
    mean = float(steps.sum()) / len(steps)
    variance = float(np.square(steps).sum()) / len(steps) - mean * mean
    deviation = math.sqrt(max(0.0, variance)) / float(scale) * 2
    return _F32(max(-_LARGEST, min(_LARGEST, float(values.max()) - sigmas * deviation)))


def _common_beginnings(items: list[int]) -> list[int]:
    """How many items from each place on are equal to those from the first on (Gusfield's Z algorithm)."""
    lengths = [0] * len(items)
    left = right = 0
    for place in range(1, len(items)):
        length = min(right - place, lengths[place - left]) if place < right else 0
        while place + length < len(items) and items[length] == items[place + length]:
            length += 1
        lengths[place] = length
        if place + length > right:
            left, right = place, place + length
    return lengths


def _power(base: float, exponent: int) -> float:
    """By squaring, every product rounded."""
    result = 1.0
    while exponent:
        if exponent % 2:
            result *= base
        base, exponent = base * base, exponent // 2
    return result


def _uniforms(seed: int, counter: int) -> tuple[float, float]:
    """Two draws in [0, 1), of Philox4x32-10 (Salmon et al., SC 2011): see kernels.random."""
    low = 0xFFFFFFFF
    a, b, c, d, k, m = counter & low, counter >> 32, 0, 0, seed & low, seed >> 32
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (y >> 32) ^ b ^ k, y & low, (x >> 32) ^ d ^ m, x & low
        k, m = (k + 0x9E3779B9) & low, (m + 0xBB67AE85) & low
    return ((a << 32 | b) >> 11) * 2.0**-53, ((c << 32 | d) >> 11) * 2.0**-53
