"""ModelManifest: the folder of weights explains itself. Written at export, read at load; nothing is guessed from a name.

A model folder holds manifest.json, model.onnx, weights.bin, tokenizer.json and, for chat models, chat_template.jinja.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_llm.errors import ModelFormatError, OutdatedModelError, UnsupportedModelError

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
GRAPH_NAME = "model.onnx"
WEIGHTS_NAME = "weights.bin"
TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"
GOLDEN_NAME = "golden.json"
"""what the model said of a few prompts when it was imported; it may be missing, and no digest of it is kept"""
MAX_MANIFEST_BYTES = 4 << 20
MAX_SYSTEM_PROMPT = 4096
"""characters"""
IMPORT_AGAIN = "import the model again"
"""the hint for a folder that is no sound model"""


@dataclass(frozen=True, slots=True)
class RopeTable:
    """One rotary table: `base` (theta), `rotary_dim` of the head's dimensions turn; `factor` divides positions (linear scaling).

    `frequency_factors`, where given, divide the frequency of each pair of dimensions (Llama 3's scaling).
    """

    base: float
    rotary_dim: int
    factor: float = 1.0
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs between layers: the index of its rope table (None: no rotation) and its window in rows (None: global)."""

    rope: int | None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """Sizes of the graph. `context` is the trained one in tokens."""

    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int


@dataclass(frozen=True, slots=True)
class TokenSpec:
    """Ids that steer generation: `bos` is prepended to raw text when `add_bos`; `eos` are all the ids that end an answer."""

    bos: int | None
    eos: tuple[int, ...]
    add_bos: bool = False
    padding: int | None = None


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """The file the weights came from. `tensor_types` counts matrices by type; `fidelity` says per type "bit-exact" or the largest
    relative error that storing it in this layout cost."""

    file: str
    sha256: str
    size: int
    format: str
    tensor_types: Mapping[str, int] = field(default_factory=dict)
    fidelity: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileSpec:
    """Size in bytes and SHA-256 of one file of the folder."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """Everything the runtime needs to know of a model; see the fields' own types."""

    name: str
    architecture: str
    layout: str
    dimensions: ModelDimensions
    layers: tuple[LayerSpec, ...]
    rope: tuple[RopeTable, ...]
    tokens: TokenSpec
    source: SourceSpec
    files: Mapping[str, FileSpec]
    kv_type: str = "int8"
    sampling: Mapping[str, float] = field(default_factory=dict)
    """recommended defaults of SamplingParams"""
    system_prompt: str | None = None
    """what stands in for a system message in a conversation that has none; None: whatever the template does"""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_calls: Mapping[str, str] = field(default_factory=dict)
    """how it writes tool calls (fields of `ToolSyntax`); empty: its template takes no tools, they are told in words"""
    reasoning: Mapping[str, str] = field(default_factory=dict)
    """the markers around its reasoning (fields of `ReasoningMarkers`); empty: it has none"""
    quality: Mapping[str, float] = field(default_factory=dict)
    license: str | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        _check(self)

    @property
    def has_chat_template(self) -> bool:
        return TEMPLATE_NAME in self.files

    @property
    def weight_bytes(self) -> int:
        return self.files[WEIGHTS_NAME].size

    @property
    def parameters(self) -> int:
        """Numbers in the model's matrices; shared embeddings count once, the vectors of norms not at all."""
        size, layers = self.dimensions, len(self.layers)
        attention = 2 * (size.heads + size.kv_heads) * size.head_dim
        embeddings = sum(self.source.tensor_types.values()) - 7 * layers  # q, k, v, output, gate, up, down
        layer = size.hidden * (attention + 3 * size.intermediate)
        return layers * layer + max(1, embeddings) * size.vocab * size.hidden

    def to_json(self) -> str:
        """The text of manifest.json; `from_json` gives an equal manifest back."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ModelManifest:
        """Raises `ModelFormatError` for anything that is not a sound manifest, `UnsupportedModelError` for another version
        (`OutdatedModelError` for an older one)."""
        try:
            raw = json.loads(text)
            if not isinstance(raw, dict):
                raise TypeError("not an object")
            if raw.get("format_version") != FORMAT_VERSION:
                raise _other_version(raw.get("format_version"))
            return cls(
                **{
                    **raw,
                    "dimensions": ModelDimensions(**raw["dimensions"]),
                    "layers": tuple(LayerSpec(**layer) for layer in raw["layers"]),
                    "rope": tuple(_rope_table(table) for table in raw["rope"]),
                    "tokens": TokenSpec(**{**raw["tokens"], "eos": tuple(raw["tokens"]["eos"])}),
                    "source": SourceSpec(**raw["source"]),
                    "files": {name: FileSpec(**spec) for name, spec in raw["files"].items()},
                }
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise ModelFormatError(f"manifest.json is not a sound manifest: {error}", hint=IMPORT_AGAIN) from None

    @classmethod
    def read(cls, folder: Path) -> ModelManifest:
        """The manifest of a model folder. Raises `ModelFormatError`."""
        path = folder / MANIFEST_NAME
        try:
            if not path.is_file():  # a named pipe would wait for a writer
                raise FileNotFoundError(errno.ENOENT, "not a regular file")
            with path.open("rb") as file:
                data = file.read(MAX_MANIFEST_BYTES + 1)
        except OSError as error:
            denied = isinstance(error, PermissionError)
            raise ModelFormatError(
                f"{folder.name} has no readable {MANIFEST_NAME}: {error.strerror}",
                hint=f"give yourself the rights: chmod -R u+rwX {folder}" if denied else IMPORT_AGAIN,
            ) from None
        if len(data) > MAX_MANIFEST_BYTES:
            raise ModelFormatError(f"{MANIFEST_NAME} is larger than {MAX_MANIFEST_BYTES} bytes")
        try:
            return cls.from_json(data.decode("utf-8"))
        except UnicodeDecodeError:
            raise ModelFormatError(f"{MANIFEST_NAME} is not UTF-8") from None


def _other_version(version: object) -> UnsupportedModelError:
    if _whole(version, FORMAT_VERSION + 1, 1 << 30):
        return UnsupportedModelError(
            f"manifest.json has format version {version}, this program reads {FORMAT_VERSION}",
            hint="the model was imported by a newer edge-llm: upgrade this one",
        )
    return OutdatedModelError(
        f"manifest.json has format version {version!r}, this program reads {FORMAT_VERSION}",
        hint="the model was imported by an older edge-llm: `edge-llm pull NAME`, or import its file again",
    )


def _rope_table(raw: dict[str, Any]) -> RopeTable:
    factors = raw.get("frequency_factors")
    return RopeTable(**{**raw, "frequency_factors": None if factors is None else tuple(factors)})


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ModelFormatError(f"manifest.json: {what}", hint=IMPORT_AGAIN)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 2**53


def _whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _check(manifest: ModelManifest) -> None:
    """Bounds that every later size computation relies on."""
    size = manifest.dimensions
    _require(
        isinstance(manifest.name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", manifest.name) is not None,
        "bad name",
    )
    if manifest.layout != "ring":
        raise UnsupportedModelError(f"unknown layout {manifest.layout!r}")
    _require(_whole(size.vocab, 1, 1 << 22), "vocab out of range")
    _require(_whole(size.context, 1, 1 << 24), "context out of range")
    for name in ("hidden", "intermediate"):
        _require(
            _whole(getattr(size, name), 32, 1 << 18) and getattr(size, name) % 32 == 0,
            f"{name} must be a multiple of 32",
        )
    _require(_whole(size.head_dim, 8, 1024) and size.head_dim % 8 == 0, "head_dim out of range")
    _require(
        _whole(size.heads, 1, 1024) and _whole(size.kv_heads, 1, 1024) and size.heads % size.kv_heads == 0,
        "heads out of range",
    )
    _require((size.heads * size.head_dim) % 32 == 0, "heads * head_dim must be a multiple of 32")
    _require(1 <= len(manifest.layers) <= 512 and len(manifest.rope) <= 8, "too many layers or rope tables")
    for table in manifest.rope:
        _require(_whole(table.rotary_dim, 2, size.head_dim) and table.rotary_dim % 2 == 0, "rotary_dim out of range")
        _require(
            all(math.isfinite(x) and x > 0 for x in (table.base, table.factor)), "rope base and factor must be positive"
        )
        factors = table.frequency_factors
        if factors is not None:
            _require(len(factors) == table.rotary_dim // 2, "rope has the wrong number of frequency factors")
            _require(all(math.isfinite(x) and x > 0 for x in factors), "rope's frequency factors must be positive")
    _require(len({table.rotary_dim for table in manifest.rope}) <= 1, "rope tables of different widths")
    for layer in manifest.layers:
        _require(
            layer.rope is None or _whole(layer.rope, 0, len(manifest.rope) - 1), "a layer names a missing rope table"
        )
        _require(layer.window is None or _whole(layer.window, 1, 1 << 24), "window out of range")
    tokens = manifest.tokens
    for token_id in (*tokens.eos, *(i for i in (tokens.bos, tokens.padding) if i is not None)):
        _require(_whole(token_id, 0, size.vocab - 1), "a special token lies outside the vocabulary")
    _require(
        manifest.system_prompt is None
        or (isinstance(manifest.system_prompt, str) and len(manifest.system_prompt) <= MAX_SYSTEM_PROMPT),
        "system_prompt must be a short text",
    )
    for name, values in (("sampling", manifest.sampling), ("quality", manifest.quality)):
        _require(isinstance(values, Mapping) and all(map(_is_number, values.values())), f"{name} must hold numbers")
    _require(isinstance(manifest.template_kwargs, Mapping), "template_kwargs must be an object")
    for name, markers in (("tool_calls", manifest.tool_calls), ("reasoning", manifest.reasoning)):
        sound = isinstance(markers, Mapping) and all(isinstance(text, str) for text in markers.values())
        _require(sound, f"{name} must hold texts")
    texts = (manifest.architecture, manifest.source.file, manifest.source.sha256, manifest.source.format)
    _require(all(isinstance(text, str) for text in (*texts, manifest.license or "")), "a text is expected")
    for mapping in (manifest.source.tensor_types, manifest.source.fidelity):
        _require(isinstance(mapping, Mapping), "source must count its types")
    counts = manifest.source.tensor_types.values()
    _require(all(_whole(count, 0, 1 << 20) for count in counts), "source must count its types")
    _require(manifest.kv_type in ("int8", "f32"), "unknown kv_type")
    for name in (GRAPH_NAME, WEIGHTS_NAME, TOKENIZER_NAME):
        _require(name in manifest.files, f"{name} is not listed")
    for name, spec in manifest.files.items():
        _require(name in (GRAPH_NAME, WEIGHTS_NAME, TOKENIZER_NAME, TEMPLATE_NAME), f"unknown file {name!r}")
        _require(
            _whole(spec.size, 0, 1 << 46) and isinstance(spec.sha256, str) and len(spec.sha256) == 64,
            f"bad entry for {name}",
        )
