"""The sampler's truth: docs/sampling.md step by step, with sorting and Python's whole numbers; slow and plain."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
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


def uniforms(seed: int, counter: int) -> tuple[Fraction, Fraction]:
    """Two draws in [0, 1): the first 53 bits of either half of Philox's output."""
    words = philox((counter % 2**32, counter >> 32, 0, 0), (seed % 2**32, seed >> 32))
    first, second = (Fraction((high << 32 | low) >> 11, 2**53) for high, low in (words[:2], words[2:]))
    return first, second


def adjusted(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    allowed: np.ndarray | None = None,
    breakers: Collection[int] = (),
) -> np.ndarray:
    """Logits after bias and bans, mask and penalties; `allowed` is bool [vocab], `breakers` are tokens."""
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
    if params.dry_multiplier:
        for token, penalty in repeat_penalties([*prompt, *generated], breakers, params).items():
            values[token] = bounded(float(values[token]) - penalty)
    if (values == -np.inf).all():
        raise NothingAllowed
    return values


def bounded(value: float) -> np.float32:
    return F32(value if value == -math.inf else min(LARGEST, max(-LARGEST, value)))


def repeat_penalties(text: Sequence[int], breakers: Collection[int], params: SamplingParams) -> dict[int, float]:
    """DRY: what each token that would lengthen a repeat loses. Every place is compared with the end."""
    window = text[-params.dry_penalty_last_n :]
    limit = next((back for back, token in enumerate(reversed(text)) if token in breakers), len(text))
    longest: dict[int, int] = {}
    for end, follower in enumerate(window[1:]):
        length = 0
        while length < limit and length <= end and window[end - length] == window[-1 - length]:
            length += 1
        if length >= params.dry_allowed_length and follower not in breakers:
            longest[follower] = max(length, longest.get(follower, 0))
    beyond = {token: length - params.dry_allowed_length for token, length in longest.items()}
    return {token: min(params.dry_multiplier * power(params.dry_base, n), 128.0) for token, n in beyond.items()}


def power(base: float, exponent: int) -> float:
    """By squaring, every product rounded."""
    result = 1.0
    while exponent:
        if exponent % 2:
            result *= base
        base, exponent = base * base, exponent // 2
    return result


def sigma_floor(values: np.ndarray, sigmas: float) -> np.float32:
    """Top-n-sigma's lowest value that stays; the deviation is that of whole steps of 2**-21 of the range."""
    finite = values[values > -np.inf] * F32(0.5)
    depths = finite.max() - finite
    if depths.max() == 0:
        return values.max()
    with np.errstate(over="ignore"):
        scale = min(F32(2**21) / depths.max(), F32(LARGEST))
    steps = [int(step) for step in np.rint(depths * scale)]
    mean = float(sum(steps)) / float(len(steps))
    variance = float(sum(step * step for step in steps)) / float(len(steps)) - mean * mean
    return bounded(float(values.max()) - sigmas * (math.sqrt(max(0.0, variance)) / float(scale) * 2))


def powers(values: np.ndarray, top: np.float32, temperature: float) -> np.ndarray:
    """float32 log2 of exp((values - top) / temperature), at least -40."""
    with np.errstate(over="ignore"):
        return np.maximum((values - top) * F32(min(LOG2_E / temperature, LARGEST)), F32(-40))


def weights(values: np.ndarray, temperature: float) -> list[int]:
    """exp((value - largest) / temperature) in units of 2**-33, by the float32 steps that the kernel is bound to."""
    return weights_of(powers(values, values.max(), temperature))


def weights_of(power: np.ndarray) -> list[int]:
    """2**power in units of 2**-33."""
    whole = np.rint(power)
    fraction = np.zeros_like(power)
    for coefficient in POLYNOMIAL:
        fraction = F32(coefficient) + (power - whole) * fraction
    return [int(weight) for weight in np.rint(np.ldexp(fraction, whole.astype(np.int32) + 33))]


def typical(mass: dict[int, int], values: np.ndarray, params: SamplingParams) -> dict[int, int]:
    """The tokens whose depth (below the most probable one, in steps of 2**-20 bits) is nearest to the mean depth."""
    ids, total = list(mass), sum(mass.values())
    depths = np.rint(powers(values[ids], values.max(), params.temperature) * F32(-(2**20)))
    products = np.rint(np.array(list(mass.values()), F32) * depths / F32(2**20))
    mean = round(float(sum(int(product) for product in products)) * 2.0**20 / float(total))
    distance = {token: abs(int(depth) - mean) for token, depth in zip(ids, depths, strict=True)}
    reached, bound = 0, 0
    for token in sorted((token for token in ids if mass[token]), key=distance.__getitem__):
        reached, bound = reached + mass[token], distance[token]
        if reached >= max(1, math.ceil(params.typical_p * total)):
            break
    return {token: weight for token, weight in mass.items() if distance[token] <= bound}


def nucleus(mass: dict[int, int], top_p: float) -> dict[int, int]:
    """In the order (-weight, id) the shortest beginning that reaches top_p of the whole."""
    need, total, inside = math.ceil(top_p * sum(mass.values())), 0, set()
    for token in sorted(mass, key=lambda token: (-mass[token], token)):
        inside.add(token)
        total += mass[token]
        if total >= need:
            break
    return {token: weight for token, weight in mass.items() if token in inside}


def without_top_choices(mass: dict[int, int], threshold: float) -> dict[int, int]:
    """XTC, once the coin has fallen: of those at or above the threshold only the last in the order (-weight, id) stays."""
    least = threshold * float(sum(mass.values()))
    top = [token for token in sorted(mass, key=lambda token: (-mass[token], token)) if mass[token] >= least]
    return {token: weight for token, weight in mass.items() if token not in top[:-1]}


def kept(
    values: np.ndarray, params: SamplingParams, *, mu: float | None = None, xtc: bool = False
) -> tuple[dict[int, int], int]:
    """Weight of each token that stays, ids rising, and the sum of weights before mirostat with this `mu`."""
    ranked = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if mu is None and params.top_k:
        ranked = ranked[: params.top_k]
    ids = sorted(ranked)
    mass = dict(zip(ids, weights(values[ids], params.temperature), strict=True))
    if params.top_n_sigma:
        floor = sigma_floor(values, params.top_n_sigma)
        mass = {token: weight if values[token] >= floor else 0 for token, weight in mass.items()}
    total = sum(mass.values())
    if mu is not None:
        (share,) = weights_of(np.array([max(F32(-40), min(F32(-mu), F32(0)))], F32))
        least = min(UNIT, math.ceil(share / UNIT * float(total)))
        return {token: weight for token, weight in mass.items() if weight >= max(1, least)}, total
    if params.typical_p < 1:
        mass = typical(mass, values, params)
    heaviest = max(mass.values())
    if params.top_p < 1:
        mass = nucleus(mass, params.top_p)
    mass = {token: weight for token, weight in mass.items() if weight >= params.min_p * heaviest and weight > 0}
    return without_top_choices(mass, params.xtc_threshold) if xtc else mass, total


def sample(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    allowed: np.ndarray | None = None,
    counter: int = 0,
    breakers: Collection[int] = (),
    mu: float = 0.0,
) -> int:
    """The token; `params` is complete and has a seed. Raises InvalidRow or NothingAllowed."""
    return sample_with_surprise(logits, params, prompt, generated, allowed, counter, breakers, mu)[0]


def sample_with_surprise(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    allowed: np.ndarray | None = None,
    counter: int = 0,
    breakers: Collection[int] = (),
    mu: float = 0.0,
) -> tuple[int, float]:
    """The token, and its surprise in bits before mirostat cut the distribution (0 at temperature 0)."""
    values = adjusted(logits, params, prompt, generated, allowed, breakers)
    if params.temperature == 0:
        return int(np.argmax(values)), 0.0
    draw, coin = uniforms(params.seed, counter)
    mirostat = mu if params.mirostat_tau else None
    mass, total = kept(values, params, mu=mirostat, xtc=coin < params.xtc_probability)
    target = math.floor(float(draw) * float(sum(mass.values())))
    for token, weight in mass.items():
        if target < weight:
            return token, math.log2(total / weight)
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
